"""NEFTune: the noise of transformers' trainer, the same however the model is cut; none in tests."""

import pytest
import torch
from transformers.integrations.neftune import activate_neftune

from pp_models import class_of_key
from stageline.modules.layer_seeds import LayerSeeds
from stageline.modules.new_rows import NewRows, noisy_modules
from stageline.pipeline.stage_passes import model_inputs
from tests.helpers.tiny_batches import drop_pixels, tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class, tiny_whole

ALPHA = 5.0


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for family in ("llama", "gpt2", "internvl"):
        tiny_whole(family, folder / family)
    return folder


def stages_of(base, family, num_stages, **options):
    part = class_of_key(family)
    stages = []
    for stage in range(num_stages):
        model, _, _ = part.build(
            **{"config_path": None, "processor_path": None, "checkpoint_path": str(base)},
            **{"stage": stage, "num_stages": num_stages, "is_piece": True, **options},
        )
        stages.append(model)
    return stages


@torch.no_grad()
def chain(stages, family, seeds=None, micro_batch=0):
    batch = {n: v for n, v in tiny_micro_batches(family)[0].items() if n != "labels"}
    tensors = (batch["input_ids"],)
    for stage in stages:
        if seeds is not None:
            seeds.start(stage, micro_batch)
        own = batch if stage.stage == 0 else drop_pixels(batch)
        out = stage(*tensors, **model_inputs(own))
        tensors = out if isinstance(out, tuple) else (out,)
    return tensors[0]


@pytest.mark.parametrize("family", ["internvl"])
def test_the_noise_is_that_of_the_library(family, bases):
    (stage,) = stages_of(bases / family, family, 1, neftune_alpha=ALPHA)
    plain = auto_class(family).from_pretrained(bases / family).train()
    batch = {n: v for n, v in tiny_micro_batches(family)[0].items() if n != "labels"}
    with torch.no_grad():
        without = plain(**batch).logits
        activate_neftune(plain, ALPHA)
        torch.manual_seed(4)
        expected = plain(**batch).logits
        torch.manual_seed(4)
        found = chain([stage], family)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert (expected - without).abs().max() > 1e-3
        # none in evaluation
        torch.testing.assert_close(chain([stage.eval()], family), without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "internvl"])
def test_any_number_of_stages_draws_the_same(family, bases):
    cuts = [{"num_stages": 1}, {"num_stages": 4}]
    if family == "internvl":  # a tower of its own draws before or behind the embedding
        cuts.append({"num_stages": 2, "vision_stages": 1})
    found = []
    for cut in cuts:
        stages = stages_of(bases / family, family, **cut, neftune_alpha=ALPHA)
        seeds = LayerSeeds(stages, seed=7)
        outputs = []
        for step, micro_batch in ((0, 0), (0, 1), (1, 0), (0, 0)):
            seeds.begin(step)
            outputs.append(chain(stages, family, seeds, micro_batch))
            seeds.end()
        found.append(outputs)
    first = found[0]
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    for outputs in found[1:]:
        for ours, theirs in zip(outputs, first, strict=True):
            assert torch.equal(ours, theirs)


def test_rows_of_new_tokens_get_noise_too(bases):
    rows = NewRows((5,), ((6,),), frozenset(), train_alone=True)
    (stage,) = stages_of(bases / "llama", "llama", 1, neftune_alpha=ALPHA, new_rows=rows)
    (embedding,) = noisy_modules(stage)
    ids = torch.tensor([[5, 5, 6]])
    with torch.no_grad():
        hidden = embedding(ids)
        assert not torch.equal(hidden[0, 0], hidden[0, 1])
        width = hidden.shape[-1]
        noise = hidden - embedding.eval()(ids)
    assert 0 < noise.abs().max() <= ALPHA / (3 * width) ** 0.5
