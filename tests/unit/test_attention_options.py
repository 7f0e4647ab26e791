"""--attention: what reaches a train_model part, and which kernels are refused before a run."""

import importlib.util
from types import SimpleNamespace

import pytest

from options.fields import OptionError, check_together, replaced
from options.train import RunConfig, attention_arguments, check_attention, check_attention_device


def part(own=None):
    return SimpleNamespace(kwargs={"attn_implementation": own})


def test_only_a_chosen_kernel_reaches_the_part():
    assert attention_arguments(RunConfig()) == {}
    wanted = {"attn_implementation": "flex_attention"}
    assert attention_arguments(RunConfig(attention="flex")) == wanted
    check_attention(RunConfig(attention="sdpa"), part())
    check_attention(RunConfig(attention="sdpa"), part("sdpa"))
    check_attention(RunConfig(), part("flash_attention_2"))


@pytest.mark.parametrize(
    ("run", "own", "match"),
    [
        ({"attention": "sdpa"}, "eager", "--train-model.attn_implementation eager"),
        ({"attention": "flex", "device": "cpu"}, None, "Use --attention sdpa"),
        (
            {"attention": "flash", "device": "cpu", "bf16": True},
            None,
            "on cpu. Use --attention sdpa",
        ),
        ({"attention": "flash"}, None, "Add --bf16"),
    ],
)
def test_what_cannot_run_is_refused(run, own, match):
    with pytest.raises(OptionError, match=match):
        check_attention(RunConfig(**run), part(own))


def test_flash_attention_needs_its_package(monkeypatch):
    run = RunConfig(attention="flash", bf16=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install flash-attn"):
        check_attention(run, part())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_attention(run, part())


def test_a_type_that_the_config_names_is_looked_at_where_it_is_known(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_attention(RunConfig(attention="flash", dtype="auto"), part())
    # `with_folders` has put --bf16 or nothing in the place of --dtype auto
    check_attention_device(RunConfig(attention="flash", bf16=True), "cuda")
    with pytest.raises(OptionError, match="Add --bf16"):
        check_attention_device(RunConfig(attention="flash"), "cuda")
    for option in ("fp32.norms", "fp32.logits"):
        check_together(replaced(RunConfig(dtype="auto"), {option: True}))


def test_a_device_that_was_found_later_is_looked_at_too():
    for kind in ("cuda", "xpu"):
        check_attention_device(RunConfig(attention="flex"), kind)
    with pytest.raises(OptionError, match="--attention flex .* on npu"):
        check_attention_device(RunConfig(attention="flex"), "npu")
