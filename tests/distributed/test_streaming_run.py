"""`--engine streaming` through the entry file: equal to a pipeline, exact to resume, refusals."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from stageline.checkpoint.plain_model import load_plain
from tests.helpers.few_bit import write_fp8
from tests.helpers.forked_entry import run_entry
from tests.helpers.small_run import Job, assert_same_tensors
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer

STEPS = 4
OPTIONS = ("--total-steps", STEPS, "--save-steps", 2)
STREAMING = ("--engine", "streaming", "--num-stages", 4, *OPTIONS)
ADAPTERS = ("--llm-lora-num", 1, "--lora.dropout", 0.1, "--parts.lm_head.frozen")
KILL = "at=step,step=3,do=sigkill"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("job"), num_layers=4, tied=True)


def assert_same(job, ours, theirs):
    """The same losses and the same last checkpoint, to the bit."""
    assert job.losses(ours) == job.losses(theirs)
    last = f"checkpoints/step-{STEPS:08d}"
    assert_same_tensors(job.folder / ours / last, job.folder / theirs / last)


@pytest.mark.parametrize("options", [(), ADAPTERS], ids=["tied", "adapters"])
def test_a_killed_run_equals_that_of_a_pipeline(job, options):
    name = f"{len(options)}"
    options += ("--eval-samples", 8)
    job.train(f"pipeline-{name}", *OPTIONS, *options, ranks=2)
    options += ("--streaming.stages", 1)
    killed = job.fork(f"streaming-{name}", *STREAMING, *options, ranks=1, chaos=KILL, waits=True)
    assert killed.code != 0 and job.checkpoints(f"streaming-{name}")[-1] == "step-00000002"
    done = job.train(f"streaming-{name}", *STREAMING, *options, "--resume", "auto", ranks=1)
    assert "streaming: 4 stages in host memory through cpu" in done.out
    assert "2 of 4 steps are done" in done.out
    assert_same(job, f"streaming-{name}", f"pipeline-{name}")


def test_a_killed_run_with_stale_updates_resumes_to_the_same_bits(job):
    name, options = "resumed", ("--stale-step", "--bf16")
    assert job.fork(f"straight{name}", *STREAMING, *options, ranks=1).code == 0
    killed = job.fork(name, *STREAMING, *options, ranks=1, chaos=KILL, waits=True)
    assert killed.code != 0 and job.checkpoints(name)[-1] == "step-00000002"
    done = job.train(name, *STREAMING, *options, "--resume", "auto", ranks=1)
    assert "2 of 4 steps are done" in done.out
    assert_same(job, name, f"straight{name}")


@pytest.mark.parametrize("kind", ["nf4", "released"])
def test_few_bit_experts_stream_resume_and_are_read_by_peft(kind, tmp_path):
    """The released bits are compared with a pipeline over the dequantized weights."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    job = Job(tmp_path, family="qwen3_moe", num_layers=4, make_model=False)
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "moe_intermediate_size": 64}
    tiny_whole("qwen3_moe", job.model, **sizes)
    tokenizer.save_pretrained(job.model)
    if kind == "released":
        write_fp8(job.model)
    leaves = "q_proj,experts.gate_up_proj,experts.down_proj"
    options = ("--llm-lora-num", 1, "--parts.lm_head.frozen", "--lora.target", leaves)
    options += ("--logits-chunk", 4)
    bits = ("--quantization", kind, *(["--double-quantization"] if kind == "nf4" else []))
    own = bits if kind == "nf4" else ()
    job.train("pipeline", *OPTIONS, *options, *own, "--num-stages", 1, ranks=1)
    options += bits
    killed = job.fork("streamed", *STREAMING, *options, ranks=1, chaos=KILL, waits=True)
    assert killed.code != 0
    done = job.train("streamed", *STREAMING, *options, "--resume", "auto", ranks=1)
    assert "2 of 4 steps are done" in done.out
    assert kind == "nf4" or "layers are kept as fp8" in done.out
    assert_same(job, "streamed", "pipeline")
    last = job.folder / f"streamed/checkpoints/step-{STEPS:08d}"
    (adapter,) = [file.parent for file in last.rglob("adapter_config.json")]
    base = AutoModelForCausalLM.from_pretrained(job.model)
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        before = base(ids).logits
        after = peft.PeftModel.from_pretrained(base, adapter).eval()(ids).logits
    expected = load_plain(adapter)(ids).logits
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-3


def test_stages_are_as_many_as_decoder_layers(job):
    done = run_entry(job.command("alone", "--engine", "streaming", "--total-steps", 1)[1:])
    assert done.returncode == 0, done.stderr
    assert "streaming: 4 stages" in done.stdout


REFUSED = {
    "--schedule gpipe": "does not go with --engine streaming",
    "--compile-layers": "does not go with --engine streaming",
    "--streaming.budget 0.00001": "layer 0 needs",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused(job, words):
    done = job.fork("refused", *STREAMING, *words.split(), ranks=1)
    assert done.code == 2
    assert REFUSED[words] in done.err and words.split()[0] in done.err, done.err
