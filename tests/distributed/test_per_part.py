"""Parts with LoRA, rates and new tokens of their own: through train_pp, resumed, exported."""

import functools
import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import pp_models  # noqa: F401 - export.py finds stage models in the register
from commands.export import make_stages
from models.builders import auto
from options.train import on_resume
from stageline.data.text.processor import get_tokenizer, load_processor
from tests.helpers.exports import export_folder
from tests.helpers.small_run import Job, saved_tensors
from tests.helpers.tiny_models import tiny_config, tiny_processor

TOKENS = ("<left>", "<right>")
OPTIONS = (
    "--image-token auto --prompt vqa --batch-size 4 --total-steps 4 --save-steps 2 "
    "--vit-lora-num 1 --parts.vit.lora_rank 4 --mlp-lora-num 1 --parts.mlp.lora_rank 2 "
    "--llm-lora-num 1 --lora.rank 8 --parts.llm.lora_target q_proj,v_proj --parts.vit.lr 1e-3 "
    "--parts.llm.lr 2e-2 --parts.lm_head.lr 3e-2 --vocab.new_tokens <left>,<right> "
    "--vocab.train_new"
).split()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    job = Job(folder, family="internvl", num_rows=12, num_layers=4, make_model=False)
    processor = tiny_processor("internvl")
    processor.save_pretrained(job.model)
    torch.manual_seed(1)
    config = tiny_config("internvl", vocab_size=len(processor.tokenizer))
    AutoModelForImageTextToText.from_config(config).save_pretrained(job.model)
    rows = [
        {
            "id": str(i),
            "image": "a.png",
            "question": f"{i}<left>?",
            "answer": TOKENS[i % 2] + "!" * (i % 3),
        }
        for i in range(12)
    ]
    job.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Image.new("RGB", (20, 30), (200, 10, 10)).save(folder / "a.png")
    done = job.train("first", *OPTIONS)
    job.out = done.out
    return job


def test_rates_and_ranks_are_told(job):
    assert ", vit 1.0e-03, llm 2.0e-02, lm_head 3.0e-02" in job.out
    for record in job.records("first"):
        assert record["lr_vit"] == pytest.approx(0.1 * record["lr"])
        assert record["lr_llm"] == pytest.approx(2 * record["lr"])
    config = json.loads((checkpoint(job) / "adapter_config.json").read_text())
    assert {config["r"], *config["rank_pattern"].values()} == {2, 4, 8}
    size = len(tiny_processor("internvl").tokenizer)
    assert set(map(tuple, config["trainable_token_indices"].values())) == {(size, size + 1)}
    again = get_tokenizer(load_processor(checkpoint(job)))
    assert again.convert_tokens_to_ids(list(TOKENS)) == [size, size + 1]


def checkpoint(job, name="first", step=4):
    return job.folder / name / "checkpoints" / f"step-{step:08d}"


def test_resumed_it_ends_the_same(job):
    job.train("resumed", *OPTIONS, "--resume", checkpoint(job, step=2))
    expected, found = (saved_tensors(checkpoint(job, name)) for name in ("first", "resumed"))
    weights = [name for name in expected if name.startswith("/")]
    assert any("trainable_tokens_delta" in name for name in weights)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    half = saved_tensors(checkpoint(job, step=2))
    assert any(not torch.equal(half[name], expected[name]) for name in weights if "delta" in name)


def test_another_rate_at_resume_counts(job):
    assert on_resume("parts.vit.lr") == "steps" and on_resume("vocab.new_tokens") == "course"
    assert {on_resume(f"teacher.{name}") for name in ("url", "model", "table")} == {"course"}
    other = [*OPTIONS, "--parts.vit.lr", "0", "--resume", checkpoint(job, step=2)]
    done = job.train("changed", *other, "--allow-changes")
    assert "parts.vit.lr: 0.001 then, 0.0 now" in done.out
    before, after = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (checkpoint(job, step=2), checkpoint(job, "changed"))
    )
    is_same = {name: torch.equal(before[name], after[name]) for name in before}
    assert {same for name, same in is_same.items() if "vision_tower" in name} == {True}
    others = {same for name, same in is_same.items() if "q_proj.lora_B" in name}
    assert False in others


@pytest.mark.parametrize("merges", [False, True], ids=["adapter", "merged"])
def test_the_export_computes_the_same_and_knows_the_tokens(job, merges, tmp_path):
    report = export_folder(
        checkpoint(job), tmp_path / "out", merge=merges, make_stages=functools.partial(make_stages)
    )
    assert report.verdict is not None and "stages" in report.verdict.reference
    assert report.verdict.probes == ("text", "image")
    card = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "--parts.vit.lora_rank 4",
        "--parts.mlp.lora_rank 2",
        "--parts.llm.lora_target ",
    ):
        assert line in card
    model, processor, _ = auto(str(tmp_path / "out"))
    size = len(tiny_processor("internvl").tokenizer)
    (ids,) = get_tokenizer(processor)(["<right>"], add_special_tokens=False)["input_ids"]
    assert ids == [size + 1]
    rows = load_file(checkpoint(job) / "adapter_model.safetensors")
    delta = next(v for n, v in rows.items() if "embed_tokens.token_adapter" in n)
    assert torch.equal(model.get_input_embeddings().weight[size:], delta)
    assert model.get_output_embeddings().weight.shape[0] == size + 2


def test_rows_alone_in_a_model_that_started_at_random(tmp_path):
    """Resumed on another number of stages; the folder is a model with its tokenizer."""
    job = Job(tmp_path, tied=True)
    start = ("--model-path", "", "--config-path", job.model, "--processor-path", job.model)
    tokens = ("--vocab.new_tokens", ",".join(TOKENS), "--vocab.train_new")
    options = (*start, "--total-steps", 4, *tokens)
    assert job.fork("one", *options).code == 0
    before = checkpoint(job, "one", step=2)
    options = (*options, "--num-stages", 1, "--resume", before)
    job.train("two", *options, ranks=1)
    one, two = (saved_tensors(checkpoint(job, name)) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6)
    size = len(get_tokenizer(load_processor(job.model)))
    assert one["/model.embed_tokens.weight"].shape[0] == size + 2
    model, processor, _ = auto(str(checkpoint(job, "two")))
    assert model.config.vocab_size == size + 2 == len(processor)
