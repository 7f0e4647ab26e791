"""rsLoRA, DoRA, PiSSA, exclusions and fully trained modules, against `peft` on the whole model."""

import copy
import json

import peft
import pytest
import torch

from stageline.checkpoint.adapter import attach_adapter, read_adapter
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from stageline.modules.lora import lora_stacks, merge_lora
from tests.helpers.chain import chained_logits
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class, load_stages, tiny_whole

LORA = {"llm_lora_num": 1, "lora_rank": 4, "lora_alpha": 6.0, "frozen_lm_head": True}
KINDS = {
    "rslora": ({"use_rslora": True}, {"use_rslora": True}),
    "dora": ({"use_dora": True}, {"use_dora": True}),
    "pissa": ({"lora_init": "pissa"}, {"init_lora_weights": "pissa"}),
    "pissa_dora_rslora": (
        {"lora_init": "pissa", "use_dora": True, "use_rslora": True},
        {"init_lora_weights": "pissa", "use_dora": True, "use_rslora": True},
    ),
    "excluded": (
        {"lora_exclude": ["o_proj", r".*layers\.1\..*"]},
        {"exclude_modules": r".*(o_proj|layers\.1\..*)"},
    ),
    "whole": ({"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for family, tied in (("llama", False), ("gpt2", True)):
        tiny_whole(family, folder / family, tied=tied)
    return folder


def stages_of(base, num_stages=2, checkpoint=None, **options):
    stages = load_stages(base, checkpoint, num_stages, **{**LORA, **options})
    return [stage.train() for stage in stages]


def peft_of(base, family="llama", **options):
    whole = auto_class(family).from_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules="all-linear", **options)
    return peft.get_peft_model(whole, config)


def inputs_of(family="llama"):
    batch = tiny_micro_batches(family)[0]
    return {name: value for name, value in batch.items() if name != "labels"}


def chain(stages, family="llama"):
    return chained_logits(stages, inputs_of(family))


def loss_of(logits):
    """A loss with another weight for each number, so that no gradient cancels."""
    weights = torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)
    return (logits.log_softmax(-1) * weights).mean()


@torch.no_grad()
def shake(named):
    """Change the trained weights, by names and shapes of `peft`, in the same way on both sides."""
    for name, parameter in named.items():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name) + parameter.numel())
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((drawn * 0.1).to(parameter.dtype))


def by_peft_name(stages):
    """Return our parameters under the names that `peft` gives them."""
    named = {}
    for model in stages:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            name = name.replace(".lora_module.", ".base_layer.").replace(".lora.lora_", ".lora_")
            for half in ("A", "B"):
                name = name.replace(f"lora_{half}.weight", f"lora_{half}.default.weight")
            name = name.replace("magnitude_vector", "magnitude_vector.default.weight")
            named["base_model.model." + name] = parameter
    return named


def their_parameters(model):
    named = dict(model.named_parameters())
    return {name.replace(".modules_to_save.default.", "."): p for name, p in named.items()}


@pytest.mark.parametrize(
    ("kind", "num_stages"), [*((kind, 2) for kind in KINDS), ("pissa_dora_rslora", 4)]
)
def test_loss_and_gradients_are_those_of_peft(kind, num_stages, bases):
    ours_options, their_options = KINDS[kind]
    stages = stages_of(bases / "llama", num_stages, **ours_options)
    model = peft_of(bases / "llama", **their_options)
    ours, theirs = by_peft_name(stages), their_parameters(model)
    trained = {name for name, p in theirs.items() if p.requires_grad}
    assert trained == {name for name, p in ours.items() if p.requires_grad}
    for name in trained if "pissa" in kind else ():
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    model.double()
    for stage in stages:
        stage.double()
    with torch.no_grad():
        for name in ours.keys() & theirs.keys():
            theirs[name].copy_(ours[name])
    shake(ours)
    shake(theirs)
    expected = loss_of(model(**inputs_of()).logits)
    found = loss_of(chain(stages))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    expected.backward()
    found.backward()
    for name in trained:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-9, atol=1e-13)
        assert theirs[name].grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("kind", "family"),
    [*((kind, "llama") for kind in KINDS), ("pissa_dora_rslora", "gpt2"), ("whole", "gpt2")],
)
def test_peft_loads_what_we_save(kind, family, bases, tmp_path):
    options = dict(KINDS[kind][0])
    if family == "gpt2":
        names = {"modules_to_save": ["wte"], "lora_exclude": ["c_proj"]}
        options = {name: names.get(name, value) for name, value in options.items()}
    stages = stages_of(bases / family, **options)
    shake(by_peft_name(stages))
    with torch.no_grad():
        expected = chain([stage.eval() for stage in stages], family)
        folder = save_split_model(stages, None, tmp_path / "adapter")
        plain = auto_class(family).from_pretrained(bases / family).eval()
        before = plain(**inputs_of(family)).logits
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), folder).eval()
        found = theirs(**inputs_of(family)).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (before - expected).abs().max() > 0.01
        ours = attach_adapter(plain, folder).eval()
        torch.testing.assert_close(ours(**inputs_of(family)).logits, expected, rtol=1e-4, atol=1e-5)
        merged = merge_lora(ours)(**inputs_of(family)).logits
        torch.testing.assert_close(merged, expected, rtol=1e-3, atol=2e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    if options.get("use_rslora") and "pissa" not in kind:
        assert (config["use_rslora"], config["r"], config["lora_alpha"]) == (True, 4, 6.0)
    assert (config["r"] == 8) == ("pissa" in kind)


def test_a_tied_head_is_trained_with_its_embedding(bases, tmp_path):
    stages = stages_of(bases / "gpt2", modules_to_save=["lm_head"])
    names = [{n for n, p in s.named_parameters() if p.requires_grad} for s in stages]
    assert "transformer.wte.weight" in names[0] & names[1]
    folder = save_split_model(stages, None, tmp_path / "adapter")
    assert read_adapter(folder).extras.keys() == {"lm_head.weight", "transformer.wte.weight"}


def test_ours_reads_dora_of_peft_and_goes_on(bases, tmp_path):
    model = peft_of(bases / "llama", use_dora=True, use_rslora=True)
    shake(dict(model.named_parameters()))
    model.save_pretrained(tmp_path / "theirs")
    expected = model.eval()(**inputs_of()).logits
    plain = auto_class("llama").from_pretrained(bases / "llama").eval()
    ours = attach_adapter(plain, tmp_path / "theirs").eval()
    torch.testing.assert_close(ours(**inputs_of()).logits, expected, rtol=1e-5, atol=1e-6)
    kind = {"use_dora": True, "adapter_path": [tmp_path / "theirs"], "llm_lora_num": 0}
    stages = [stage.eval() for stage in stages_of(bases / "llama", **kind)]
    torch.testing.assert_close(chain(stages), expected, rtol=1e-5, atol=1e-6)
    assert "DoRA on" in stages[0].start.notes[0]


def test_dropout_of_dora_is_that_of_peft(bases):
    model = peft_of(bases / "llama", use_dora=True, lora_dropout=0.3)
    stages = stages_of(bases / "llama", 1, use_dora=True, lora_dropout=0.3)
    ours, theirs = by_peft_name(stages), their_parameters(model)
    with torch.no_grad():
        for name in ours.keys() & theirs.keys():
            theirs[name].copy_(ours[name])
    shake(ours)
    shake(theirs)
    torch.manual_seed(3)
    expected = model.train()(**inputs_of()).logits
    torch.manual_seed(3)
    torch.testing.assert_close(chain(stages), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", ["default", "pissa_niter_3", "orthogonal"])
def test_a_start_is_the_same_for_any_number_of_stages(start, bases):
    sides = [stages_of(bases / "llama", n, lora_init=start) for n in (1, 4)]
    states = [{n: t for s in stages for n, t in s.state_dict().items()} for stages in sides]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, states[0][name]), name
    plain = auto_class("llama").from_pretrained(bases / "llama").eval()
    with torch.no_grad():
        expected = plain(**inputs_of()).logits
        found = chain([stage.eval() for stage in sides[1]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    some = next(iter(lora_stacks(sides[0][0]).values()))[0].lora
    assert bool(some.lora_B.weight.any()) == (start not in ("default", "gaussian"))


def test_pissa_goes_on_from_what_it_took(bases, tmp_path):
    stages = stages_of(bases / "llama", lora_init="pissa")
    shake(by_peft_name(stages))
    folder = save_split_model(stages, None, tmp_path / "adapter")
    again = stages_of(bases / "llama", 1, lora_init="pissa", lora_taken_from=str(folder))
    state = {n: t for s in stages for n, t in s.state_dict().items()}
    for name, tensor in again[0].state_dict().items():
        if ".lora." not in name:
            assert torch.equal(tensor, state[name]), name
    for name, wrappers in lora_stacks(again[0]).items():
        first = lora_stacks(stages[0]) | lora_stacks(stages[1])
        for ours, theirs in zip(wrappers[0].lora.taken, first[name][0].lora.taken, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"use_dora": True, "llm_lora_num": 2},
            "--lora.use_dora allows 1 adapter, not --llm-lora-num 2",
        ),
        ({"lora_init": "pissa", "lora_rank": 1000}, "with rank 1000 does not fit"),
        ({"lora_init": "orthogonal", "lora_rank": 3}, "needs an even rank, and this is 3"),
        ({"lora_exclude": ["proj", r".*"]}, r"--lora.exclude proj,\.\* leaves none"),
        ({"modules_to_save": ["embed_token"]}, "modules_to_save embed_token is not a module"),
    ],
)
def test_what_cannot_be(options, message, bases):
    with pytest.raises(UserError, match=message):
        stages_of(bases / "llama", **options)
