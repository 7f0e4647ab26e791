"""Packed rows under flash and flex attention, which train only on GPUs."""

import pytest
import torch

from loss_fn import sft
from options.train import KERNELS
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.data.batches.batch import pack_rows
from stageline.data.text.encode import Encoded
from stageline.stages.packing import check_packing
from tests.helpers.tiny_batches import FIRST_TEXT_ID, count_targets
from tests.helpers.tiny_models import VOCAB_SIZE, tiny_config

pytestmark = pytest.mark.real
LENGTHS = (31, 17, 44)
FIELDS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32


def build(kernel, family, dtype, num_stages=2):
    stages = []
    for stage in range(num_stages):
        fields = {**FIELDS, **({"head_dim": 32} if family == "gemma2" else {})}
        config = tiny_config(family, max_position_embeddings=128, **fields)
        model = CausalLMStage(
            config,
            stage=stage,
            num_stages=num_stages,
            dtype=dtype,
            attn_implementation=KERNELS[kernel],
        )
        init_split_model(model, seed=3, device="cuda", dtype=dtype)
        stages.append(model.train())
    return stages


def loss_and_grads(stages, batches):
    """Run micro-batches; the loss has the tokens that have one before them in their sample."""
    count = torch.tensor(float(count_targets(batches)), device="cuda")
    total = 0.0
    for batch in batches:
        batch = {name: value.cuda() for name, value in batch.items()}
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        value = batch["input_ids"]
        for stage in stages:
            value = stage(value, **inputs)
        loss = sft(value, batch, num_targets=count)
        loss.backward()
        total += loss.item()
    grads = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                grads[name], parameter.grad = parameter.grad.float(), None
    return total, grads


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_packed_rows_are_the_samples_alone(kernel, family):
    if kernel == "flash":
        pytest.importorskip("flash_attn")
    dtype = torch.bfloat16 if kernel == "flash" else torch.float32
    tolerance = 3e-2 if kernel == "flash" else 1e-3
    stages = build(kernel, family, dtype)
    for stage in stages:
        check_packing(stage, rows=1, device="cuda")
    generator = torch.Generator().manual_seed(5)
    rows = [
        Encoded(
            torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, (n,), generator=generator).tolist(),
            [True] * n,
            [False] * n,
        )
        for n in LENGTHS
    ]
    loss, grads = loss_and_grads(stages, [pack_rows([rows], pad_token_id=0)])
    alone = [pack_rows([[row]], pad_token_id=0) for row in rows]
    wanted, reference = loss_and_grads(stages, alone)
    assert loss == pytest.approx(wanted, rel=tolerance)
    assert set(grads) == set(reference)
    for name, grad in reference.items():
        difference = (grads[name] - grad).abs().max().item()
        assert difference <= tolerance * max(grad.abs().max().item(), 1e-3), name
