"""Registers: keys, homes, duplicates, unknown keys, freezing."""

import inspect
import sys
from pathlib import Path

import pytest

from register import (
    ALL_REGISTERS,
    ROOT,
    Register,
    RegisterError,
    UnknownKeyError,
    freeze_registers,
    import_shelf,
    restored_registers,
)


@pytest.fixture
def parts() -> Register:
    return Register("loss_fn", "adds numbers")


def _line() -> int:
    return inspect.currentframe().f_back.f_lineno


def test_decorator_registers_under_each_key_and_returns_the_part(parts):
    @parts("one", "other")
    def part():
        """First line.

        More.
        """

    assert parts["one"] is parts["other"] is part
    assert part.__name__ == "part"
    assert parts.summary("one") == "First line."


@pytest.mark.parametrize(
    "again",
    [
        lambda parts: parts.__setitem__("taken", len),
        lambda parts: parts("taken")(len),
        lambda parts: parts.update({"taken": len}),
        lambda parts: parts.update(taken=len),
        lambda parts: parts.register("taken", len),
    ],
    ids=["item", "decorator", "update", "update_keyword", "register"],
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


def test_a_part_of_the_wrong_kind_is_refused(parts):
    with pytest.raises(RegisterError, match="got a int"):
        parts["a"] = 3
    texts = Register("prompt", "a template", part_type=str)
    with pytest.raises(RegisterError, match="'str'"):
        texts["a"] = print
    texts["b"] = "[IMAGE]\n[ANSWER]"
    assert texts.summary("b") == "[IMAGE]\\n[ANSWER]"


def test_a_frozen_register_refuses_every_change(parts):
    parts["a"] = print
    parts.freeze()
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


def test_registers_are_restored_with_homes_and_frozen_state():
    metric = ALL_REGISTERS["metric"]
    before = dict(metric)
    with restored_registers():
        metric["only_here"] = print
        freeze_registers()
        assert all(register.is_frozen for register in ALL_REGISTERS.values())
    assert dict(metric) == before and not metric.is_frozen
    with pytest.raises(UnknownKeyError):
        metric.home("only_here")


# -- lazy targets, facts, true homes -----------------------------------------------------------


def test_a_target_is_imported_when_its_part_is_asked_for(parts, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_parts_of_a_test.py").write_text('def f():\n    """Adds."""\n')
    parts["later"] = "lazy_parts_of_a_test:f"
    assert "later" in parts and "lazy_parts_of_a_test" not in sys.modules
    assert parts["later"].__name__ == "f" and parts.summary("later") == "Adds."
    assert sys.modules.pop("lazy_parts_of_a_test")


@pytest.mark.parametrize("target", ["no_such_module:f", "register:no_such_name"])
def test_a_target_that_does_not_import_names_its_home(parts, target):
    parts["later"] = target
    home = f"{__file__}:{_line() - 1}"
    with pytest.raises(RegisterError, match="can't be imported") as error:
        parts["later"]
    assert home in str(error.value) and target in str(error.value)


def test_facts_stand_in_the_entry_with_their_defaults():
    losses = Register("loss_fn", facts={"counts": {}, "needs_kl": False})
    losses("a", needs_kl=True)(print)
    losses.register("b", print, counts={"num_pairs": len})
    losses["plain"] = print
    assert losses.entry("a").facts == {"counts": {}, "needs_kl": True}
    assert losses.entry("b").facts == {"counts": {"num_pairs": len}, "needs_kl": False}
    assert losses.entry("plain").facts == {"counts": {}, "needs_kl": False}


def test_an_unknown_fact_is_refused(parts):
    losses = Register("loss_fn", facts={"counts": {}, "needs_reference": False})
    with pytest.raises(RegisterError) as error:
        losses("a", needs_referenc=True)(print)
    home = f"{__file__}:{_line() - 1}"
    for wanted in (
        *(home, "needs_referenc=True", "Did you mean needs_reference?"),
        *("counts, needs_reference", "docs/add_a_part.md"),
    ):
        assert wanted in str(error.value)
    with pytest.raises(RegisterError, match="Known are: none"):
        parts.register("a", print, counts={})
    assert not losses and not parts


def test_the_home_of_each_shipped_part_is_the_line_that_names_its_key():
    from commands import train  # noqa: F401 - its engines

    import_shelf()
    homes = {
        (name, key): register.home(key).rsplit(":", 1)
        for name, register in ALL_REGISTERS.items()
        for key in register
    }
    ours = {where: home for where, home in homes.items() if home[0].startswith(str(ROOT))}
    assert len(ours) > 80
    wrong = [
        (where, file, line)
        for where, (file, line) in ours.items()
        if f'"{where[1]}"' not in Path(file).read_text().splitlines()[int(line) - 1]
    ]
    assert wrong == []
    assert len(set(map(tuple, ours.values()))) >= len(ours) - 1  # sft and pt are one loss
