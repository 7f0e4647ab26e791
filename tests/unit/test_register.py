"""Registers: keys, homes, duplicates, unknown keys, freezing."""

import inspect

import pytest

from register import LossFacts, Register, RegisterError, UnknownKeyError


@pytest.fixture
def parts() -> Register:
    return Register("loss_fn", "adds numbers")


def _line() -> int:
    return inspect.currentframe().f_back.f_lineno


@pytest.mark.parametrize(
    "again",
    [
        lambda parts: parts.__setitem__("taken", len),
        lambda parts: parts("taken")(len),
        lambda parts: parts.update(taken=len),
        lambda parts: parts.register("taken", len),
    ],
    ids=["item", "decorator", "update_keyword", "register"],
)
def test_a_taken_key_is_refused_and_both_homes_are_named(parts, again):
    parts["taken"] = print
    first = f"{__file__}:{_line() - 1}"
    with pytest.raises(RegisterError) as error:
        again(parts)
    assert first in str(error.value)
    assert str(error.value).count(__file__) == 2
    assert parts["taken"] is print
    assert error.value.exit_code == 2


def test_unknown_key_names_register_option_nearest_all_and_how_to_add(parts):
    parts.update(cross_entropy=print, ppo=print, dpo=print)
    with pytest.raises(UnknownKeyError) as error:
        parts["cross_entropi"]
    message = str(error.value)
    for wanted in (
        "--loss-fn cross_entropi",
        "loss_fn_register",
        "Did you mean 'cross_entropy'?",
        "cross_entropy, dpo, ppo",
        "from register import loss_fn_register",
        "--import",
    ):
        assert wanted in message
    assert isinstance(error.value, ValueError)
    assert error.value.exit_code == 2


def test_a_frozen_register_refuses_every_change(parts):
    parts["a"] = print
    parts.is_frozen = True
    changes = (
        lambda: parts.update(b=len),
        lambda: parts.pop("a"),
        lambda: parts.clear(),
        lambda: parts.register("a", len, replace=True),
    )
    for change in changes:
        with pytest.raises(RegisterError, match="frozen"):
            change()
    assert dict(parts) == {"a": print}


# -- facts -------------------------------------------------------------------------------------


def test_facts_stand_in_the_entry_with_their_defaults():
    losses = Register("loss_fn", facts=LossFacts)
    losses("a", needs_kl=True)(print)
    losses.register("b", print, counts={"num_pairs": len})
    losses["plain"] = print
    assert losses.entry("a").facts == LossFacts(needs_kl=True)
    assert losses.entry("b").facts == LossFacts(counts={"num_pairs": len})
    assert losses.entry("plain").facts == LossFacts()


def test_an_unknown_fact_is_refused(parts):
    losses = Register("loss_fn", facts=LossFacts)
    with pytest.raises(RegisterError) as error:
        losses("a", needs_referenc=True)(print)
    home = f"{__file__}:{_line() - 1}"
    for wanted in (
        *(home, "needs_referenc=True", "Did you mean needs_reference"),
        *("counts, default_keys, ", "docs/add_a_part.md"),
    ):
        assert wanted in str(error.value)
    with pytest.raises(RegisterError, match="Known are: default_keys, without_effect"):
        parts.register("a", print, counts={})
    assert not losses and not parts


def test_a_contract_tells_what_the_run_hands_over():
    losses = Register("loss_fn", contract="part(a_BT, b, *, num_targets, [step, sim_fn], **own)")
    assert losses.handed == (2, {"num_targets", "step", "sim_fn"})
    assert Register("metric", contract="part(predictions, samples, **own)").handed == (2, set())
    assert Register("prompt").handed == (0, set())
