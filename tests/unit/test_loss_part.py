"""Test the arguments and results of a loss_fn component: batch counts, the step, figures."""

import functools

import pytest
import torch
from torch.nn import functional

from parse_args import parse_train_args
from register import (
    engine_register,
    import_shelf,
    loss_fn_register,
    sim_fn_register,
)
from stageline.errors import UserError
from stageline.plotting.figures import loss_figure
from stageline.run_records import read_log
from stageline.training.loss_part import RESERVED, LossPart, StepLoss
from stageline.training.run_log import RunLog, StepRecord
from tests.helpers.registers import restored_registers

import_shelf()


def two_terms(logits, batch, *, num_targets, num_long, step, weight=2.0, sim_fn=None):
    """A sum of terms with counts of their own."""
    long = logits[batch["is_long"]].sum() / num_long
    loss = logits.sum() / num_targets + weight * step * long
    return loss, {"long": long, "both": logits.sum() / num_targets + long}


COUNTS = {"num_long": lambda batch: int(batch["is_long"].sum())}


def plain(logits, batch, *, num_targets):
    return logits.sum() / num_targets


BATCHES = [
    {"labels": torch.tensor([[-100, 3, 4]]), "is_long": torch.tensor([True, False, True])},
    {"labels": torch.tensor([[-100, -100, 4]]), "is_long": torch.tensor([False, False, True])},
]
LOGITS = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([8.0, 16.0, 32.0])]


def torch_style(output, target):
    """A loss with the signature of the founding notes: a mean over targets."""
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def test_a_loss_of_output_and_target_is_the_mean_over_the_whole_batch():
    draw = torch.Generator().manual_seed(3)
    labels = torch.tensor([[-100, 3, 4, 1], [-100, -100, 4, -100], [-100] * 4, [-100, -100, 0, 2]])
    logits = torch.randn(4, 4, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    expected = torch_style(logits, labels)
    (wanted,) = torch.autograd.grad(expected, logits)
    part = LossPart(functools.partial(torch_style))
    totals = {"num_targets": torch.tensor(float(part.count([{"labels": labels}])["num_targets"]))}
    shares = [
        part(logits[row : row + 1], {"labels": labels[row : row + 1]}, totals=totals, step=0)[0]
        for row in range(4)
    ]
    torch.testing.assert_close(sum(shares), expected)
    (found,) = torch.autograd.grad(sum(shares), logits)
    torch.testing.assert_close(found, wanted)


def test_counts_step_and_options_reach_the_part():
    part = LossPart(
        functools.partial(functools.partial(two_terms, weight=3.0), sim_fn=None), counts=COUNTS
    )
    assert part.count(BATCHES) == {"num_targets": 3, "num_long": 3}
    totals = {name: torch.tensor(float(n)) for name, n in part.count(BATCHES).items()}
    shares = [
        part(logits, batch, totals=totals, step=2)
        for logits, batch in zip(LOGITS, BATCHES, strict=True)
    ]
    assert sum(loss for loss, _ in shares).item() == pytest.approx(63 / 3 + 3 * 2 * 37 / 3)
    assert sum(told["long"] for _, told in shares).item() == pytest.approx(37 / 3)


def test_a_part_that_asks_for_nothing_gets_nothing_else():
    part = LossPart(plain)
    assert part.count(BATCHES) == {"num_targets": 3}
    first = {"labels": torch.tensor([[3, 4, -100], [5, -100, 6]])}  # which nothing predicts
    assert part.count([first]) == {"num_targets": 2}
    loss, figures = part(LOGITS[0], BATCHES[0], totals={"num_targets": torch.tensor(2.0)}, step=9)
    assert (loss.item(), figures) == (3.5, {})


def test_figures_keep_no_graph():
    logits = LOGITS[0].clone().requires_grad_()
    totals = {"num_targets": torch.tensor(2.0), "num_long": torch.tensor(2.0)}
    loss, figures = LossPart(two_terms, counts=COUNTS)(logits, BATCHES[0], totals=totals, step=0)
    assert loss.requires_grad and figures
    assert not any(value.requires_grad for value in figures.values())


def test_the_step_loss_adds_figures_up():
    loss_of = StepLoss(
        LossPart(two_terms, counts=COUNTS),
        num_targets=3,
        counts={"num_targets": 3, "num_long": 3},
        step=1,
        num_micro_batches=2,
        scale=1024.0,
        device=torch.device("cpu"),
    )
    for logits, batch in zip(LOGITS, BATCHES, strict=True):
        loss_of(logits, batch)
    assert loss_of.loss.item() == pytest.approx(21 + 2 * 37 / 3)
    assert {name: value.item() for name, value in loss_of.figures.items()} == pytest.approx(
        {"long": 37 / 3, "both": 21 + 37 / 3}
    )


def test_sums_for_totals_that_are_known_later():
    part = LossPart(two_terms, counts=COUNTS)
    sums = part.sums(LOGITS[0], BATCHES[0], step=3)
    assert {n: {c: v.item() for c, v in by.items()} for n, by in sums.items()} == {
        "loss": {"num_targets": 7.0, "num_long": 30.0},
        "long": {"num_targets": 0.0, "num_long": 5.0},
        "both": {"num_targets": 7.0, "num_long": 5.0},
    }


@pytest.mark.parametrize("name", ["num_targets", "step", "num_other"])
def test_a_count_that_cannot_be_handed_over(name):
    def part(logits, batch, *, num_targets, step):
        """A loss."""

    with pytest.raises(UserError, match=f"declares the count '{name}'"):
        LossPart(part, counts={name: len})


def test_names_of_the_log_are_taken():
    def part(logits, batch, *, num_targets):
        return logits.sum(), {"grad_norm": logits.sum()}

    with pytest.raises(UserError, match="figures named grad_norm"):
        LossPart(part)(LOGITS[0], {}, totals={"num_targets": torch.tensor(1.0)}, step=0)
    record = StepRecord(
        step=1, loss=1.0, learning_rate=1.0, grad_norm=1.0, num_tokens=1, num_targets=1,
        num_samples=1, seconds=1.0, extra_loss=1.0, problem="p",
    )  # fmt: skip
    assert set(record.logged()) <= RESERVED


def test_figures_are_in_the_log_the_line_and_the_curve(tmp_path):
    figures = {"marked_loss": 0.5, "accuracy": 0.25}
    names = ("learning_rate", "grad_norm", "num_tokens", "num_targets", "num_samples", "seconds")
    record = StepRecord(step=1, loss=1.0, figures=figures, **dict.fromkeys(names, 1))
    assert "marked_loss 0.5000 | accuracy 0.2500" in str(record)
    log = RunLog(tmp_path, total_steps=1)
    log.log_step(record)
    log.log_eval(1, {"loss": 1.0, **figures})
    log.close()
    steps, evaluations = read_log(tmp_path / "log.jsonl")
    assert [record["marked_loss"] for record in (*steps, *evaluations)] == [0.5] * 2
    labels = loss_figure(steps, evaluations).axes[0].get_legend_handles_labels()[1]
    assert {"marked loss", "accuracy"} <= set(labels)


# -- options -------------------------------------------------------------------------------


KEYS = (
    "--dataset jsonl --prompt vqa --prompt-fn fill --image-token none --train-model llama "
    "--collate-fn sft"
).split()


def needs_similarity(logits, batch, *, num_targets, num_long, step, sim_fn, sharp: float = 1.0):
    """A loss with counts that have no type, and an option."""


def scaled(a, b, *, factor: float = 2.0):
    """A similarity with an option."""


@pytest.fixture
def parts():
    with restored_registers():
        engine_register.register("pipeline", len, replace=True)
        loss_fn_register.register("needs", needs_similarity, counts={"num_long": len})
        sim_fn_register.register("scaled", scaled)
        yield


def test_the_similarity_is_chosen_where_the_loss_takes_one(parts):
    words = [*KEYS, "--loss-fn", "needs", "--sim-fn", "scaled", "--sim-fn.factor", "3"]
    arguments = parse_train_args([*words, "--loss-fn.sharp", "4"])
    assert arguments.parts["sim_fn"].kwargs == {"factor": 3.0}
    assert arguments.parts["loss_fn"].kwargs == {"sharp": 4.0}
    config = arguments.as_config()
    assert (config["sim-fn"], config["sim-fn.factor"]) == ("scaled", 3.0)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--loss-fn needs", "--sim-fn is missing.*cos.js.scaled"),
        ("--loss-fn sft --sim-fn js", "--sim-fn js: --loss-fn sft takes no sim_fn"),
        ("--loss-fn needs --sim-fn js --loss-fn.num_long 3", "unknown option --loss-fn.num.long"),
    ],
)
def test_wrong_choices(parts, words, wanted):
    with pytest.raises(ValueError, match=wanted) as error:
        parse_train_args([*KEYS, *words.split()])
    assert error.value.exit_code == 2


def test_marked_words_are_a_list_or_a_name(parts):
    words = [*KEYS[:-1], "contrastive", "--loss-fn", "contrastive", "--sim-fn", "js"]
    several = ["left", "upper left", "\u5de6"]
    for given, wanted in ((["clock"], "clock"), (["[]"], []), (several, several)):
        arguments = parse_train_args([*words, "--collate-fn.marked", *given])
        assert arguments.parts["collate_fn"].kwargs["marked"] == wanted
    assert parse_train_args(words).parts["collate_fn"].kwargs["marked"] == "directions"


def test_perplexity_is_of_cross_entropy_alone():
    """A focal loss is a sum over tokens, too, but exp of it is not a perplexity."""
    losses = {key for key in loss_fn_register if loss_fn_register.entry(key).facts.is_cross_entropy}
    assert losses == {"sft", "pt"} and not LossPart(plain, is_token_sum=True).is_cross_entropy
