"""A quantized base on a GPU: transformers' numbers, the same bits in every split, fewer bytes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.load import fill_stage
from stageline.modules.methods import Methods
from stageline.modules.quantised import Quantization
from tests.helpers.chain import run_chain
from tests.helpers.tiny_batches import count_targets, tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

pytestmark = pytest.mark.real
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(tiny_config("llama", **SIZES)).save_pretrained(path)
    return path


def make_stages(folder, kind, num_stages):
    stages = []
    for stage in range(num_stages):
        model = CausalLMStage(
            AutoConfig.from_pretrained(folder),
            stage=stage,
            num_stages=num_stages,
            dtype=HALF,
            methods=Methods(quantization=Quantization(kind)),
            llm_lora_num=1,
        )
        fill_stage(model, str(folder), device="cuda", dtype=HALF)
        stages.append(model)
    return stages


def batches():
    found = tiny_micro_batches("llama", lengths=(14, 11))
    return [{name: value.cuda() for name, value in batch.items()} for batch in found]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_split_gives_the_same_bits(folder, kind):
    pytest.importorskip("bitsandbytes")
    made = []
    for num_stages in (1, 2):
        stages = make_stages(folder, kind, num_stages)
        for stage in stages:
            assert all(p.is_cuda for p in stage.parameters())
            assert all(b.is_cuda for b in stage.buffers())
        count = count_targets(batches())
        losses = run_chain(
            stages, batches(), loss_fn=lambda o, b, n=count: sft(o, b, num_targets=n)
        )
        named = [item for stage in stages for item in stage.named_parameters()]
        made.append((losses, {name: p.grad for name, p in named if p.grad is not None}))
    (losses, grads), (own_losses, own) = made
    assert all(map(torch.equal, losses, own_losses))
    assert grads.keys() == own.keys() and all(torch.equal(own[n], grads[n]) for n in grads)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_outputs_are_those_of_the_library(folder, kind):
    pytest.importorskip("bitsandbytes")
    told = BitsAndBytesConfig(
        load_in_4bit=kind == "nf4",
        load_in_8bit=kind == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=HALF,
    )
    whole = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=told, dtype=HALF, device_map="cuda"
    )
    stage = make_stages(folder, kind, 1)[0]
    batch = {name: value for name, value in batches()[0].items() if name != "labels"}
    with torch.no_grad():
        expected = whole.train()(**batch, use_cache=False).logits
        found = stage(batch["input_ids"], **batch)
    torch.testing.assert_close(found, expected)
