"""Whole runs of train_pp.py on emulated cards: their numbers are those of a CPU, and no race.

scripts/test.sh runs them on two kinds of cards: cuda, and, fewer, one that torch has no module for.

Ranks are forked, a card each, with gloo for NCCL. Files that begin with test_a come first: torch
refuses to fork a process that has run a backward pass on a card.
"""

import re
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from stageline.distributed.process_group import open_channels
from stageline.pipeline.schedules import SCHEDULES, make_schedule
from tests.gpu.test_training_on_gpu import train as train_with
from tests.helpers.emulated_gpu.cards import Cards
from tests.helpers.emulated_gpu.native import KIND
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import Job
from tests.helpers.small_vision_run import VisionJob
from tests.helpers.tiny_datasets import write_preferences

pytestmark = pytest.mark.usefixtures("cards")
TWO_STEPS = ("--total-steps", 2, "--save-steps", 0, "--batch-size", 4, "--micro-batch-size", 2)
LORA = "--llm-lora-num 1 --lora.rank 4 --parts.lm_head.frozen"
DROPOUT = f"{LORA} --lora.dropout 0.5 --neftune-alpha 5"
STREAMING = "--engine streaming --num-stages 4"
REGISTER = "--pin-model register" if KIND == "cuda" else ""  # only CUDA has it
ZBV = "--schedule zbv --num-stages 2"
# sdpa has other kernels there, and in half types other bits
BF16 = "--bf16 --attention eager"
PISSA = "pissa_niter_2" if KIND == "cuda" else "pissa"
METHODS = "--fp32.norms --fp32.logits --rope-scaling dynamic --max-token-num 300"
NEW_TOKENS = "--vocab.new_tokens <a>,<b> --vocab.train_new --llm-lora-num 1 --parts.lm_head.frozen"


class Case(NamedTuple):
    """A run on cards.

    Attributes:
        like: options of the run of one stage on the CPU that has the same losses.
        words: options besides.
        rows: a file of the job's folder; None: its usual rows.
        waits: an expression for where the host waits in a step besides its end.
    """

    like: str = ""
    words: str = ""
    ranks: int = 1
    cards: int = 1
    family: str = "llama"
    rows: str | None = None
    waits: str = "$"

    @property
    def num_layers(self):
        """Return one for each stage."""
        return 4 if STREAMING in self.words else 2


# the optimizer's thread, for gradients to arrive
ARRIVALS = "event synchronize: stageline/streaming/lanes.py"
# a reference's values come from a table; the host must know the sum of KTO's baseline
TABLE = "pageable copy to the card: stageline/pipeline/torch_stage.py"
BASELINE = f"{TABLE}|.*(training/reference|loss_fn|masking_utils).py"
CASES = {
    "zbv recompute chunk": Case(
        words=f"{ZBV} --gradient-checkpointing --logits-chunk 5 --save-steps 1 --eval-samples 4 "
        "--timeline-step 1 --num-workers 1"
    ),
    "offload operators": Case(
        words="--schedule interleaved_1f1b --num-stages 2 --stages-per-rank 2 "
        "--offload-activations --gradient-checkpointing --recompute.mode operators"
    ),
    "stages": Case(words="--num-stages 2 --eval-samples 4 --partition measured", ranks=2, cards=2),
    "shares": Case(
        words="--dp-degree 2 --dp-shard --batch-size 2 --micro-batch-size 1 --offload-activations "
        "--save-steps 1",
        ranks=2,
        cards=2,
    ),
    "replicas of stages": Case(
        words="--num-stages 2 --dp-degree 2 --batch-size 2 --micro-batch-size 1 --schedule gpipe",
        ranks=4,
        cards=4,
    ),
    "bf16": Case(BF16, f"{ZBV} --eval-samples 4 --save-steps 1 --offload-activations"),
    "lora dropout": Case(DROPOUT, f"--gradient-checkpointing {ZBV}"),
    "dora rslora": Case(f"{LORA} --lora.use_dora --lora.use_rslora", "--save-steps 1"),
    "pissa": Case(f"{LORA} --lora.init {PISSA}", ZBV),
    "new tokens": Case(NEW_TOKENS, f"{ZBV} --save-steps 1"),
    "packing replicas": Case(
        "--packing", "--dp-degree 2 --batch-size 2 --micro-batch-size 1", ranks=2, cards=2
    ),
    "packing eager fp16": Case(f"--fp16 --packing --attention eager {LORA}", ZBV),
    "methods": Case(f"{BF16} {METHODS}", ZBV, waits=".*modeling_rope_utils.py"),
    "muon": Case("--optimizer muon", ZBV),
    "adafactor": Case("--optimizer adafactor", waits=".*training/precision.py"),
    "experts": Case("--train-model.output_router_logits true", ZBV, family="mixtral"),
    "tied": Case(BF16, "--num-stages 2", ranks=2, cards=2, family="gpt2"),
    "dpo full": Case(
        "--collate-fn dpo --loss-fn dpo", f"{ZBV} --eval-samples 4", rows="dpo", waits=TABLE
    ),
    "kto": Case(
        f"--collate-fn kto --loss-fn kto --prompt chat --prompt-fn chat {LORA}",
        rows="kto",
        waits=BASELINE,
    ),
    "rewards": Case(
        "--train-model reward --collate-fn rm --loss-fn rm --prompt-fn chat", ZBV, rows="dpo"
    ),
    "streaming": Case(
        words=f"{STREAMING} --recompute-grain layer --streaming.stages 1 --save-steps 1 "
        "--eval-samples 4 --micro-batch-size 1",
        cards=4,
        waits=ARRIVALS,
    ),
    "streaming lora dropout": Case(DROPOUT, f"{STREAMING} {REGISTER}", cards=3, waits=ARRIVALS),
    "streaming stale": Case(BF16, f"{STREAMING} --stale-step", cards=2, waits=ARRIVALS),
}

if KIND != "cuda":  # these cases differ by kind
    names = ("zbv recompute chunk", "stages", "shares", "lora dropout")
    names += ("packing eager fp16", "pissa", "dpo full", "streaming stale")
    CASES = {name: CASES[name] for name in names}
shown_on_cuda = pytest.mark.skipif(KIND != "cuda", reason="the same code as on CUDA's cards")


class Jobs:
    """A job of each family, and what one stage on the CPU does; each is made once."""

    def __init__(self, tmp_path_factory):
        self.make_folder = tmp_path_factory.mktemp
        self.of_family, self.on_cpu = {}, {}

    def job(self, family, num_layers=2):
        key = family, num_layers
        if key not in self.of_family:
            made = Job(self.make_folder(family), family=family, num_layers=num_layers)
            write_preferences(made.folder)
            self.of_family[key] = made
        return self.of_family[key]

    def expected(self, case):
        """Step -> loss of one stage on the CPU."""
        key = case.family, case.num_layers, case.like, case.rows
        if key not in self.on_cpu:
            job, name = self.job(case.family, case.num_layers), f"cpu {len(self.on_cpu)}"
            job.train(name, *TWO_STEPS, *case.like.split(), *rows_of(job, case), ranks=1)
            self.on_cpu[key] = job.losses(name)
        return self.on_cpu[key]


def rows_of(job, case):
    return ("--dataset-path", job.folder / f"{case.rows}.jsonl") if case.rows else ()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory)


@pytest.fixture
def job(jobs):
    return jobs.job("llama")


def train(job, name, *words, ranks, chaos=""):
    # long: a machine that runs the whole suite is busy
    done = job.fork(
        name, *TWO_STEPS, "--device", KIND, *words, ranks=ranks, timeout=200, chaos=chaos
    )
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]
    assert ("note: float32 on a GPU" in done.out) == (not {"--bf16", "--fp16"} & set(words))
    return job.losses(name)


@pytest.mark.parametrize("name", CASES)
def test_a_run_has_the_losses_of_one_stage_on_the_cpu(jobs, name, cards, seen):
    case = CASES[name]
    cards.count = case.cards
    words = [*f"--num-stages 1 {case.like} {case.words}".split()]
    job = jobs.job(case.family, case.num_layers)
    found = train(job, name, *words, *rows_of(job, case), ranks=case.ranks)
    for waits in seen.assert_clean(case.ranks):
        ((place, count),) = [w for w in waits.items() if not re.match(case.waits, w[0])]
        assert ": stageline/training/step.py" in place and count == 1, waits
    expected = jobs.expected(case)
    if "--stale-step" in words:  # the first update comes a step later
        expected = {1: expected[1], 2: found[2]}
    # the fused update of a card rounds otherwise, which half a type may turn into its last bit
    tolerance = 2e-4 if "16" in case.like else 1e-5
    assert len(found) == len(expected) and found == pytest.approx(expected, rel=tolerance)


@shown_on_cuda
def test_a_projector_alone_trains_over_two_cards(tmp_path, cards, seen):
    """The last stage trains nothing, and takes part in the norm all the same."""
    job = VisionJob(tmp_path, family="qwen2_5_vl")
    words = "--parts.vit.frozen --parts.llm.frozen --parts.lm_head.frozen "
    words += "--batch-size 4 --micro-batch-size 1"
    cards.count = 2
    losses = train(job, "projector", *words.split(), ranks=2)
    assert len(losses) == 2
    seen.assert_clean(2)


@shown_on_cuda
def test_a_run_goes_on_from_what_it_saved_on_other_cards(jobs, cards, seen):
    """Shares of two cards, then two stages on two; the CPU's numbers in both."""
    job = jobs.job("llama")
    cards.count = 2
    shares = "--dp-degree 2 --dp-shard --batch-size 2 --micro-batch-size 1 --num-stages 1"
    train(job, "resumed", *shares.split(), "--total-steps", 1, "--save-steps", 1, ranks=2)
    words = "--num-stages 2 --resume auto --save-steps 2 --allow-changes"
    found = train(job, "resumed", *words.split(), ranks=2)
    seen.assert_clean(2)
    assert found == pytest.approx(jobs.expected(Case()), rel=1e-5)


@shown_on_cuda
def test_a_loss_that_is_no_number_is_found_on_its_card(jobs, cards, seen):
    """The passes of that step run once more, on generators set back."""
    job = jobs.job("llama")
    words = f"{ZBV} {DROPOUT}".split()
    found = train(job, "nan", *words, ranks=1, chaos="at=loss,step=1,count=2,do=value")
    seen.assert_clean(1)
    assert found[1] == pytest.approx(jobs.expected(CASES["lora dropout"])[1], rel=1e-5)
    log = (job.folder / "nan" / "log.jsonl").read_text()
    assert found[2] is None and "micro-batch" in log


def test_the_planner_measures_on_a_card(jobs, cards, seen):
    job = jobs.job("llama")
    done = job.train("plan", *TWO_STEPS, "--device", KIND, *ZBV.split(), "--plan", ranks=1)
    seen.assert_clean(1)
    assert "plan: --schedule zbv, 2 stages on 1 ranks" in done.out and "peak" in done.out


def run_schedules(rank, names):
    """Run two steps of each schedule, with transfers between the cards."""
    num_ranks, found = dist.get_world_size(), {}
    for name in names:
        schedule = make_schedule(name, num_ranks=num_ranks)
        context = SimpleNamespace(
            device=torch.device(KIND, rank), pp_group=None, pp_rank=rank, num_ranks=num_ranks
        )
        context.channels = open_channels(num_ranks, schedule.pairs, timeout=timedelta(seconds=60))
        torch.accelerator.set_device_index(rank)
        results, _, _ = train_with(context, name, torch.float32)
        found[name] = [(result.loss, result.grad_norm) for result in results]
    return found, dict(Cards.entered.races), Cards.entered.groups


@shown_on_cuda
def test_every_schedule_over_two_cards(cards):
    cards.count = 2
    ranks = run_ranks(run_schedules, 2, list(SCHEDULES))
    # several stages on one card are in test_training_on_gpu.py
    ((alone, races, _),) = run_ranks(run_schedules, 1, ["1f1b"])
    assert not races
    for found, races, groups in ranks:
        assert not races, "\n".join(races)
        assert groups == ranks[0][2]
        for name in SCHEDULES:
            for ours, theirs in zip(found[name], alone["1f1b"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5), name


@shown_on_cuda
def test_start_weights_on_the_host_are_exchanged_with_those_on_the_card(jobs, cards):
    """Full weights with a divergence from the start: the card has what the CPU has."""
    job = jobs.job("llama")
    words = (
        "--collate-fn grpo --loss-fn grpo --reward length --reward.length.longest 8 "
        "--reward.length.margin 6 --rollouts.group_size 4 --batch-size 8 "
        "--rollouts.max_completion_length 8 "
        "--rollouts.kl_beta 0.1 --loss-fn.entropy_coef 0.1 --learning-rate 3e-3 --num-stages 2"
    ).split()
    job.train("start cpu", *TWO_STEPS, *words, ranks=2)
    cards.count = 2
    train(job, "start", *words, ranks=2)
    told = [[record["kl"] for record in job.records(name)] for name in ("start", "start cpu")]
    assert told[0][0] == 0 < told[0][1] and told[0] == pytest.approx(told[1], rel=1e-3)
