"""Single layers that train, against plain transformers with requires_grad set by hand."""

import functools

import pytest
import torch

from loss_fn import sft
from pp_models import CausalLMStage, VisionLanguageStage
from stageline.errors import UserError
from stageline.modules.methods import FreezeRule, Methods
from stageline.pipeline.stage_passes import StagePasses
from stageline.shrink import shrink_config
from tests.helpers.chain import run_chain
from tests.helpers.family_configs import family_config
from tests.helpers.tiny_batches import count_targets, tiny_micro_batches
from tests.helpers.tiny_checkpoints import load_stages, tiny_whole

DTYPE = torch.float64
# the rule, and by hand what of a llama of four layers it means
RULES = {
    "last": (FreezeRule(2), ("layers.2.", "layers.3.")),
    "first": (FreezeRule(-1), ("layers.0.",)),
    "modules": (FreezeRule(3, ("mlp", "q_proj")), tuple(f"layers.{i}.mlp" for i in (1, 2, 3))),
    "extra": (FreezeRule(1, extra=("norm", "embed_tokens")), ("layers.3.", "model.norm", "embed")),
    "pro": (FreezeRule(2, spreads=True), ("layers.1.", "layers.3.")),
}
MORE = {"modules": tuple(f"layers.{i}.self_attn.q_proj" for i in (1, 2, 3))}


def make_stages(folder, num_stages, **options):
    return load_stages(folder, num_stages=num_stages, dtype=DTYPE, **options)


def gradients(stages):
    """Return gradients by name; a tied weight's is the sum over the stages that hold it."""
    found = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


def run_stages(stages, batches):
    count = count_targets(batches)
    return run_chain(stages, batches, loss_fn=lambda out, b: sft(out, b, num_targets=count))


def run_whole(whole, batches):
    """Run transformers' model with torch's loss, because transformers' own is always float32."""
    count, losses = count_targets(batches), []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = whole(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count
        loss.backward()
        losses.append(loss.detach())
    return losses, {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def make_llama(tmp_path_factory):
    """Return a function: whether its head is tied -> folder and model."""

    @functools.cache
    def make(tied):
        folder = tmp_path_factory.mktemp("llama")
        return folder, tiny_whole("llama", folder, tied=tied, dtype=DTYPE).train()

    return make


@pytest.fixture
def llama(make_llama):
    return make_llama(False)


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in RULES), ("extra", True)])
def test_gradients_are_those_of_the_library(make_llama, name, tied):
    folder, whole = make_llama(tied)
    rule, beginnings = RULES[name]
    whole.zero_grad()
    for parameter_name, parameter in whole.named_parameters():
        wanted = any(part in parameter_name for part in (*beginnings, *MORE.get(name, ())))
        parameter.requires_grad_(wanted)
    batches = tiny_micro_batches("llama", lengths=(14, 11))
    losses, grads = run_whole(whole, batches)
    assert grads
    for num_stages in (1, 4):
        stages = make_stages(folder, num_stages, methods=Methods(freeze=rule))
        found = run_stages(stages, batches)
        for own, other in zip(found, losses, strict=True):
            torch.testing.assert_close(own, other)
        own = gradients(stages)
        assert own.keys() == grads.keys()
        for parameter_name, grad in own.items():
            torch.testing.assert_close(grad, grads[parameter_name], msg=parameter_name)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tied_head_trains_as_the_embedding(make_llama, is_tied):
    folder, _ = make_llama(is_tied)
    rule = FreezeRule(1, extra=("lm_head",))
    stages = make_stages(folder, 2, methods=Methods(freeze=rule))
    trained = [[n for n, p in s.named_parameters() if p.requires_grad] for s in stages]
    head = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    assert head in trained[1]
    assert (head in trained[0]) == is_tied
    assert not [name for name in trained[0] if name != head]


def test_a_vision_tower_is_not_meant(tmp_path):
    tiny_whole("internvl", tmp_path, dtype=DTYPE)
    rule = FreezeRule(-1, ("mlp",))
    stages = make_stages(tmp_path, 2, methods=Methods(freeze=rule), frozen_vit=True)
    names = {n for s in stages for n, p in s.named_parameters() if p.requires_grad}
    layer = {name for name in names if "language_model.layers" in name}
    assert layer == {name for name in layer if "language_model.layers.0.mlp." in name} != set()
    rest = names - layer  # the projector follows its own option
    assert rest and all("projector" in name for name in rest)


def test_stages_before_the_first_that_trains_have_no_backward_pass(llama, monkeypatch):
    folder, _ = llama
    seen = []
    backward = StagePasses.backward

    def watched(self, index, kind, grads):
        made = backward(self, index, kind, grads)
        seen.append((self.model.stage, self.sends_grad, [one is not None for one in made or ()]))
        return made

    monkeypatch.setattr(StagePasses, "backward", watched)
    stages = make_stages(folder, 4, methods=Methods(freeze=FreezeRule(2, spreads=True)))
    assert [any(p.requires_grad for p in s.parameters()) for s in stages] == [0, 1, 0, 1]
    run_stages(stages, tiny_micro_batches("llama", lengths=(14,)))
    assert [(stage, sends) for stage, sends, _ in seen] == [(3, True), (2, True), (1, False)]


def test_a_frozen_stage_that_recomputes_passes_gradients_back(llama):
    """The first layer trains; the stages behind it are frozen and recompute their layers."""
    folder, _ = llama
    batches = tiny_micro_batches("llama", lengths=(14, 11))
    grads = []
    for mode in (None, "full", "operators"):
        stages = make_stages(folder, 4, methods=Methods(freeze=FreezeRule(-1)))
        if mode:
            for stage in stages:
                stage.enable_gradient_checkpointing(mode=mode)
        run_stages(stages, batches)
        grads.append(gradients(stages))
    assert all(name.startswith("model.layers.0.") for name in grads[0])
    assert grads[0].keys() == grads[1].keys() == grads[2].keys() != set()
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]) and torch.equal(grad, grads[2][name]), name
        assert grad.abs().max() > 0


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (FreezeRule(5), ["--freeze.layers 5", "has 4 layers"]),
        (FreezeRule(3, spreads=True), ["does not divide 4", "expand_blocks"]),
        (FreezeRule(1, ("mpl",)), ["has mpl", "all, ", "mlp, ", "self_attn"]),
    ],
)
def test_what_the_model_has_not_is_told_with_what_it_has(llama, rule, wanted):
    with pytest.raises(UserError) as error:
        make_stages(llama[0], 2, methods=Methods(freeze=rule))
    for text in wanted:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("family", "kind", "part", "modules"),
    [
        ("video_llava", VisionLanguageStage, "vit", ("model.image_tower", "model.video_tower")),
        ("deepseek_vl_hybrid", VisionLanguageStage, "vit", ("model.high_res_vision_model",)),
        ("phi4_multimodal", CausalLMStage, "llm", ("model.embed_tokens",)),
    ],
)
def test_a_second_tower_and_embeddings_beside_layers_freeze_with_their_part(
    family, kind, part, modules
):
    config = shrink_config(family_config(family), num_layers=1)
    model = kind(config, stage=0, num_stages=1, **{f"frozen_{part}": True})
    model.frozen()
    for path in modules:
        held = list(model.get_submodule(path).parameters())
        assert held and not any(parameter.requires_grad for parameter in held), path
    assert any(parameter.requires_grad for parameter in model.parameters())
