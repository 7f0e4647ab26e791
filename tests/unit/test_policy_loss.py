"""The loss over sampled answers against trl's own, and against an expectation written out."""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from stageline.errors import UserError
from stageline.modules.policy_loss import PolicyOptions, policy_loss, token_log_probs
from stageline.training.loss_part import LARGEST
from stageline.training.rewards import advantages, has_spread, weighted

PROMPT, ANSWER, VOCABULARY = 3, 6, 11
LENGTHS = (6, 1, 4, 2, 6, 3)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def make_batch(seed=0):
    """Right-padded rows of a prompt of 3 tokens and an answer, with what a run adds."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(len(LENGTHS), ANSWER, generator=generator, dtype=torch.float64)

    ids = torch.randint(VOCABULARY, (len(LENGTHS), PROMPT + ANSWER), generator=generator)
    columns = torch.arange(ANSWER)
    mask = columns < torch.tensor(LENGTHS)[:, None]
    labels = pad(torch.where(mask, ids[:, PROMPT:], -100), (PROMPT, 0), value=-100)
    shape = (len(LENGTHS), PROMPT + ANSWER, VOCABULARY)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    batch = {
        "input_ids": ids,
        "labels": labels,
        "loss_advantages": torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64),
        "loss_is_learnt": torch.tensor([True, True, True, False, True, True]),
        "loss_is_counted": torch.ones(len(LENGTHS), dtype=torch.bool),
    }
    now = token_log_probs(logits, batch, temperature=0.7)[:, PROMPT - 1 : -1]
    for name, scale in (("old", 0.4), ("sampled", 0.5), ("start", 0.3)):
        batch[f"loss_{name}"] = pad(now + noise(scale), (PROMPT - 1, 1))
    return batch, logits.requires_grad_(), mask


def trl_loss(batch, logits, mask, *, has_old=True, correction=None, **options):
    """Return trl's loss of the same numbers; only the model's forward is taken from here."""
    GRPOTrainer = pytest.importorskip("trl").GRPOTrainer
    trainer = object.__new__(GRPOTrainer)
    values = {
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "max_completion_length": 5,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": correction is not None,
        "vllm_importance_sampling_correction": True,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "use_adaptive_entropy": False,
        **{name: value for name, value in options.items() if name != "delta"},
    }
    trainer.__dict__.update(values, _entropy_bonus_enabled="entropy_coef" in options)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.model = SimpleNamespace(training=True)
    settings = {"delta": options.get("delta"), "use_bias_correction_kl": False}
    trainer.args = SimpleNamespace(steps_per_generation=1, **settings)
    trainer.accelerator = SimpleNamespace(
        num_processes=1,
        reduce=lambda value, reduction: value,
        gather=lambda value: value,
        sync_gradients=True,
    )

    def forward(*given, **more):
        kept = logits[:, PROMPT - 1 : -1] / 0.7
        every = kept.log_softmax(-1)
        chosen = batch["input_ids"][:, PROMPT:, None]
        return every.gather(-1, chosen)[..., 0], -(every.exp() * every).sum(-1), None

    trainer._get_per_token_logps_and_entropies = forward
    places = slice(PROMPT - 1, -1)
    learnt = (mask & batch["loss_is_learnt"][:, None]).long()
    inputs = {
        "prompt_ids": batch["input_ids"][:, :PROMPT],
        "prompt_mask": torch.ones(len(mask), PROMPT),
        "completion_ids": batch["input_ids"][:, PROMPT:],
        "completion_mask": learnt,
        "advantages": batch["loss_advantages"],
        "ref_per_token_logps": batch["loss_start"][:, places],
        "num_items_in_batch": learnt.sum(),
    }
    if has_old:
        inputs["old_per_token_logps"] = batch["loss_old"][:, places]
    if correction is not None:  # trl's own lines stand in a method that also generates
        kind, cut = correction.split("_")
        apart = (batch["loss_old"] - batch["loss_sampled"])[:, places] * learnt
        ratio = torch.exp(apart.sum(-1, keepdim=True) if kind == "sequence" else apart)
        cap = 1.3
        kept = ratio.clamp(max=cap) if cut == "truncate" else ratio.masked_fill(ratio > cap, 0.0)
        inputs["importance_sampling_ratio"] = kept
    return trainer._compute_loss(None, inputs), trainer._metrics["train"]


def our_loss(batch, logits, *, has_old=True, **options):
    columns = dict(batch)
    if not has_old:
        del columns["loss_old"]
    num_tokens = torch.tensor(float(sum(LENGTHS) - LENGTHS[3]))
    given = {"max_completion_length": 5, "temperature": 0.7, "importance_correction": "none"}
    chosen = PolicyOptions(**{**given, **options})
    answers = torch.tensor(float(len(LENGTHS)))
    return policy_loss(logits, columns, num_tokens=num_tokens, num_answers=answers, options=chosen)


TYPES = [
    ("grpo", {}),
    ("bnpo", {}),
    ("dr_grpo", {}),
    ("dapo", {"epsilon_high": 0.28, "delta": 1.5}),
    ("gspo", {"epsilon": 0.05}),
    ("cispo", {"epsilon_high": 1.1}),
]


@pytest.mark.parametrize(("beta", "has_old"), [(0.0, False), (0.04, True)])
@pytest.mark.parametrize(("loss_type", "options"), TYPES)
def test_loss_and_gradient_are_those_of_trl(loss_type, options, beta, has_old):
    batch, logits, mask = make_batch()
    theirs = {
        "loss_type": "grpo" if loss_type == "gspo" else loss_type,
        "importance_sampling_level": "sequence" if loss_type == "gspo" else "token",
        "beta": beta,
        "epsilon_low": options.get("epsilon", 0.2),
        "epsilon_high": options.get("epsilon_high", options.get("epsilon", 0.2)),
        "delta": options.get("delta"),
        "entropy_coef": 0.01,
    }
    wanted, metrics = trl_loss(batch, logits, mask, has_old=has_old, **theirs)
    wanted_gradient = torch.autograd.grad(wanted, logits)[0]
    loss, figures = our_loss(
        batch,
        logits,
        loss_type=loss_type,
        kl_beta=beta,
        entropy_coef=0.01,
        has_old=has_old,
        **options,
    )
    gradient = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(loss, wanted, **CLOSE)
    torch.testing.assert_close(gradient, wanted_gradient, **CLOSE)
    assert gradient.abs().max() > 1e-3
    assert figures["entropy"].item() == pytest.approx(metrics["entropy"][0])
    if beta:
        assert figures["kl"].item() == pytest.approx(metrics["kl"][0])
    if has_old and loss_type in ("grpo", "dapo"):
        for side in ("low", "high"):
            clipped = metrics[f"clip_ratio/{side}_mean"][0]
            assert figures[f"clip_{side}"].item() == pytest.approx(clipped)


@pytest.mark.parametrize(
    "kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_tokens_drawn_with_other_roundings_are_corrected_as_trl_does(kind):
    batch, logits, mask = make_batch()
    wanted, _ = trl_loss(batch, logits, mask, correction=kind, beta=0.1)
    loss, _ = our_loss(batch, logits, importance_correction=kind, importance_cap=1.3, kl_beta=0.1)
    plain, _ = our_loss(batch, logits, kl_beta=0.1)
    torch.testing.assert_close(loss, wanted, **CLOSE)
    ours, theirs = (torch.autograd.grad(one, logits)[0] for one in (loss, wanted))
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert abs(loss - plain) > 1e-4


@pytest.mark.parametrize(("loss_type", "options"), TYPES)
def test_any_split_into_micro_batches_adds_up(loss_type, options):
    batch, logits, _ = make_batch()
    whole, figures = our_loss(batch, logits, loss_type=loss_type, kl_beta=0.1, **options)
    parts = [
        our_loss(
            {name: value[rows] for name, value in batch.items()},
            logits[rows],
            loss_type=loss_type,
            kl_beta=0.1,
            **options,
        )
        for rows in ([2, 0, 5], [4], [1, 3])
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, **CLOSE)
    for name, value in figures.items():
        total = max if name.endswith(LARGEST) else sum
        torch.testing.assert_close(total(own[name] for _, own in parts), value, **CLOSE)


def packed_into(rows, batch, logits):
    """The answers of each row, with the prompts before them, behind each other; padding behind."""
    width = max(sum(PROMPT + LENGTHS[one] for one in row) for row in rows) + 2

    def packed(value, fill):
        lines = []
        for row in rows:
            parts = [value[one, : PROMPT + LENGTHS[one]] for one in row]
            line = torch.cat(parts) if parts else value[0, :0]
            lines.append(pad(line, (0, 0) * (line.ndim - 1) + (0, width - len(line)), value=fill))
        return torch.stack(lines)

    members = [one for row in rows for one in row]
    numbers = torch.full((len(LENGTHS), 1), -1)
    for number, one in enumerate(members):
        numbers[one] = number
    made = {
        "labels": packed(batch["labels"], -100),
        "loss_places": packed(numbers.expand(-1, PROMPT + ANSWER), -1),
    }
    for name in ("loss_old", "loss_sampled", "loss_start"):
        made[name] = packed(batch[name], 0.0)
    for name in ("loss_advantages", "loss_is_learnt", "loss_is_counted"):
        made[name] = batch[name][members]
    return made, packed(logits, 0.0)


@pytest.mark.parametrize(("correction", "has_old"), [("token_mask", False), ("none", True)])
@pytest.mark.parametrize(("loss_type", "options"), TYPES)
def test_packed_rows_give_the_same(loss_type, options, has_old, correction):
    batch, logits, _ = make_batch()
    chosen = {"kl_beta": 0.1, "entropy_coef": 0.01, "has_old": has_old, "importance_cap": 1.3}
    chosen |= {"loss_type": loss_type, "importance_correction": correction, **options}
    whole, figures = our_loss(batch, logits, **chosen)
    found = [
        our_loss(*packed_into(rows, batch, logits), **chosen)
        for rows in ([[2, 0, 5], [4]], [[1, 3]], [[]])  # the last one only fills up
    ]
    loss = sum(own for own, _ in found)
    torch.testing.assert_close(loss, whole, **CLOSE)
    ours, wanted = (torch.autograd.grad(one, logits)[0] for one in (loss, whole))
    torch.testing.assert_close(ours, wanted, **CLOSE)
    for name, value in figures.items():
        total = max if name.endswith(LARGEST) else sum
        torch.testing.assert_close(total(own[name] for _, own in found), value, **CLOSE)


def test_advantages_are_those_of_trl():
    """Written out as trl's trainer has them; a reward of nothing is in no mean."""
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.25], [2.0, torch.nan, 2.0, 2.0]]).double()
    mean = torch.tensor([[0.4375], [2.0]]).double()
    std = torch.tensor([[1.0, 0.0, 0.5, 0.25]]).double().std()
    both = torch.tensor([1.0, 0, 0.5, 0.25, 2, 2, 2]).double().std()
    group = (rewards - mean) / torch.tensor([[std + 1e-4], [1e-4]])
    wanted = {
        "group": group,
        "group_no_std": rewards - mean,
        "batch": (rewards - mean) / (both + 1e-4),
    }
    for kind, values in wanted.items():
        torch.testing.assert_close(advantages(rewards, kind), values.nan_to_num(0.0), **CLOSE)
    others = [[1 - 0.75 / 3, -1.75 / 3, 0.5 - 1.25 / 3, 0.25 - 1.5 / 3]]
    others = torch.tensor(others, dtype=torch.float64)
    torch.testing.assert_close(advantages(rewards, "rloo")[:1], others, **CLOSE)
    assert has_spread(rewards).tolist() == [True, False]
    two = torch.stack([rewards, torch.full_like(rewards, torch.nan)])
    torch.testing.assert_close(weighted(two, [0.5, 9.0]), rewards / 2, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("size", [2, 3])
def test_the_expected_gradient_is_the_policys(size):
    """Two tokens, answers of two tokens, every group of answers with its probability."""
    logits = torch.tensor([[0.3, -0.2], [0.5, 0.1], [-0.4, 0.2]]).double().requires_grad_()
    answers = list(itertools.product((0, 1), repeat=2))
    rewards = dict(zip(answers, (0.0, 1.0, 0.3, 2.0), strict=True))
    log_probs = {
        (a, b): logits[0].log_softmax(-1)[a] + logits[1 + a].log_softmax(-1)[b] for a, b in answers
    }
    expected_reward = sum(log_probs[one].exp() * rewards[one] for one in answers)
    true = torch.autograd.grad(expected_reward, logits)[0]
    for kind, share in (("rloo", 1.0), ("group_no_std", (size - 1) / size)):
        found = torch.zeros_like(true)
        for group in itertools.product(answers, repeat=size):
            chance = sum(log_probs[one].detach() for one in group).exp()
            values = torch.tensor([[rewards[one] for one in group]], dtype=torch.float64)
            rows = torch.stack([torch.stack([logits[0], logits[1 + a]]) for a, _ in group])
            batch = {
                "labels": pad(torch.tensor(group), (1, 0), value=-100),
                "loss_advantages": advantages(values, kind)[0],
                "loss_is_learnt": torch.ones(size, dtype=torch.bool),
            }
            loss, _ = policy_loss(
                pad(rows, (0, 0, 0, 1)),
                batch,
                num_tokens=torch.tensor(2.0 * size),
                num_answers=torch.tensor(float(size)),
                options=PolicyOptions(loss_type="dr_grpo", max_completion_length=1),
            )
            found -= chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
        torch.testing.assert_close(found, share * true, **CLOSE)


def test_what_is_no_loss_is_refused():
    for wrong in ({"epsilon": -0.1}, {"temperature": 0.0}, {"delta": 0.0}, {"kl_beta": -1.0}):
        with pytest.raises(UserError, match="the loss grpo has"):
            PolicyOptions(**wrong).check()
    batch, logits, _ = make_batch()
    del batch["loss_advantages"]
    with pytest.raises(UserError, match="without loss_advantages"):
        our_loss(batch, logits)


def test_the_gap_between_drawn_and_trained():
    """Mean, largest and share outside of the clip range, written out; only tokens that count."""
    batch, logits, mask = make_batch()
    is_learnt = mask & batch["loss_is_learnt"][:, None]
    apart = (batch["loss_old"] - batch["loss_sampled"])[:, PROMPT - 1 : -1][is_learnt]
    ratios = apart.exp()
    assert ratios.min() < 0.9 and ratios.max() > 1.3, "both ends"
    for options, is_out in (
        ({"epsilon": 0.1, "epsilon_high": 0.3}, (ratios < 0.9) | (ratios > 1.3)),
        ({"loss_type": "cispo", "epsilon_high": 1.3}, ratios > 1.3),
    ):
        figures = our_loss(batch, logits, **options)[1]
        assert figures["sampling_gap"] == pytest.approx(apart.abs().mean().item())
        assert figures["sampling_gap_max"] == pytest.approx(apart.abs().max().item())
        assert figures["sampling_gap_clipped"] == pytest.approx(is_out.double().mean().item())


def test_a_half_model_is_corrected_whatever_its_logits_have():
    batch, logits, _ = make_batch()
    masked, plain = (
        our_loss(batch, logits.float(), importance_correction=kind, importance_cap=1.3)[0]
        for kind in ("sequence_mask", "none")
    )
    auto = {"importance_correction": "auto", "importance_cap": 1.3}
    assert our_loss(batch, logits.float(), is_half=True, **auto)[0] == masked != plain
    assert our_loss(batch, logits.float(), is_half=False, **auto)[0] == plain
