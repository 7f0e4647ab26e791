"""Packed rows under each attention kernel: the losses of single samples, no attention across.

Two chained stages; flash attention needs a GPU and is tried in tests/gpu. flex attention has no
backward pass on a CPU: only its forward pass is tried there, not compiled, which takes long.
"""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import flex_attention
from transformers import AutoModelForCausalLM

from options.train import KERNELS, RunConfig, attention_arguments
from pp_models import CausalLMStage, RewardStage, VisionLanguageStage
from stageline.checkpoint.init import init_split_model
from stageline.data.batches.batch import pack_rows
from stageline.data.text.encode import Encoded
from stageline.errors import UserError
from stageline.stages.packing import check_packing
from tests.helpers.tiny_batches import FIRST_TEXT_ID
from tests.helpers.tiny_models import VOCAB_SIZE, tiny_config

# above and below the sliding window of 8, a sample of one token, padding after the second row
ROWS = ((11, 5, 9), (13, 1, 4))
FAMILIES = {
    "plain": ("llama", {}),
    "sliding window": ("mistral", {}),
    "capped scores": ("gemma2", {"attn_logit_softcapping": 1.0}),
}
KINDS = [
    (kernel, kind)
    for kernel in ("sdpa", "eager", "flex")
    for kind in FAMILIES
    if (kernel, kind) != ("sdpa", "capped scores")  # transformers refuses it: sdpa cannot cap
]


def build(kernel, kind, num_stages=2, dtype=torch.float64, stage_class=CausalLMStage):
    family, fields = FAMILIES[kind]
    stages = []
    for stage in range(num_stages):
        model = stage_class(
            tiny_config(family, **fields),
            stage=stage,
            num_stages=num_stages,
            dtype=dtype,
            **attention_arguments(RunConfig(attention=kernel)),
        )
        init_split_model(model, seed=3, device="cpu", dtype=dtype)
        with torch.no_grad():  # attention that hardly looks would pass anything
            for name, parameter in model.named_parameters():
                if "_proj" in name:
                    parameter.mul_(8)
        stages.append(model.train())
    return stages


def samples():
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, (n,), generator=generator) for n in row]
        for row in ROWS
    ]


def packed_of(rows):
    encoded = [
        [Encoded(ids.tolist(), [True] * len(ids), [False] * len(ids)) for ids in row]
        for row in rows
    ]
    return pack_rows(encoded, pad_token_id=0)


@torch.no_grad()
def losses(stages, batch):
    """[B, T - 1], 0 where nothing is predicted."""
    value = batch["input_ids"]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    for stage in stages:
        value = stage(value, **inputs)
    labels = batch["labels"][:, 1:]
    return functional.cross_entropy(
        value[:, :-1].transpose(1, 2), labels, ignore_index=-100, reduction="none"
    )


def losses_alone(stages, rows):
    """Compute the same as `losses` of the packed rows, with each sample in a row of its own."""
    found = []
    for row in rows:
        found.append([])
        for ids in row:
            batch = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
            # the token after a sample is not in the loss
            found[-1] += [*losses(stages, {**batch, "labels": ids[None]})[0].tolist(), 0.0]
    width = max(map(len, found))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in found])[:, :-1].double()


@pytest.fixture
def quick_flex(monkeypatch):
    """flex attention as it is, without a compiler; its own switch for debugging."""
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if not hasattr(flex_attention, name):
        pytest.skip(f"this torch has no {name}: compiling takes too long here")
    from transformers.integrations import flex_attention as in_library

    monkeypatch.setattr(flex_attention, name, True)
    monkeypatch.setattr(
        in_library.WrappedFlexAttention, "__call__", lambda self: flex_attention.flex_attention
    )
    with torch.compiler.set_stance("force_eager"):  # the masks of blocks
        yield


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("kernel", "kind"), KINDS)
def test_packed_losses_are_those_of_the_samples_alone(kernel, kind, quick_flex):
    stages = build(kernel, kind)
    assert {stage.whole.config._attn_implementation for stage in stages} == {KERNELS[kernel]}
    rows = samples()
    packed = losses(stages, packed_of(rows))
    torch.testing.assert_close(packed, losses_alone(stages, rows), rtol=0, atol=1e-6)
    # other tokens in the middle sample of a row change no loss but its own
    changed = [list(row) for row in rows]
    changed[0][1] = FIRST_TEXT_ID + (changed[0][1] + 1 - FIRST_TEXT_ID) % (
        VOCAB_SIZE - FIRST_TEXT_ID
    )
    after = losses(stages, packed_of(changed))
    first, second, _ = ROWS[0]
    own = torch.zeros_like(packed, dtype=torch.bool)
    own[0, first : first + second - 1] = True
    assert (packed[own] != after[own]).all() and torch.equal(packed[~own], after[~own])


@pytest.mark.parametrize("kind", ["plain", "capped scores"])
def test_kernels_agree_with_each_other(kind, quick_flex):
    batch = packed_of(samples())
    found = {kernel: losses(build(kernel, kind), batch) for kernel, own in KINDS if own == kind}
    for kernel, value in found.items():
        torch.testing.assert_close(value, found["eager"], rtol=0, atol=1e-6, msg=kernel)


def test_the_librarys_defaults_would_mix_samples():
    """A mask of ones, or a cache, hides the borders: what stages must not hand on."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    batch = packed_of(samples()[:1])
    shared = {name: batch[name] for name in ("input_ids", "position_ids")}
    right = model(**shared, use_cache=False).logits
    masked = model(**shared, attention_mask=batch["attention_mask"], use_cache=False).logits
    cached = model(**shared, use_cache=True).logits
    for wrong in (masked, cached):
        assert (wrong - right)[:, ROWS[0][0] :].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("stage_class", "family"),
    [(CausalLMStage, "llama"), (RewardStage, "gemma2"), (VisionLanguageStage, "llava")],
)
def test_no_stage_keeps_a_cache(stage_class, family):
    for stage in range(3):
        model = stage_class(tiny_config(family), stage=stage, num_stages=3)
        configs = [model.config, model.text_config, model.whole.config]
        configs += [module.config for module in model.modules() if hasattr(module, "config")]
        assert not any(getattr(config, "use_cache", False) for config in configs)
        assert model.cached_configs  # saved configurations have use_cache again


def test_packing_is_tried_with_the_chosen_kernel():
    for stage in build("eager", "sliding window", dtype=torch.float32):
        check_packing(stage, rows=2)


def test_a_kernel_that_an_architecture_lacks_is_refused():
    with pytest.raises(UserError, match="gemma2 cannot be built with the attention sdpa"):
        build("sdpa", "capped scores")
