"""Measurements of the planner, against plain transformers and against a whole stage that runs."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.plan_table import count
from loss_fn import sft
from pp_models import CausalLMStage, class_of_key
from stageline.errors import UserError
from stageline.modules.methods import Methods
from stageline.modules.quantised import Quantization, make_scales_parameters
from stageline.pipeline.live_bytes import PeakBytes
from stageline.pipeline.plan import Kind
from stageline.pipeline.schedules import make_schedule
from stageline.pipeline.stage_passes import StagePasses
from stageline.planner.estimate import (
    MemoryRules,
    Workload,
    estimate,
    measure,
    outline_of,
    rank_memory,
)
from stageline.planner.planner import probe_optimizer
from tests.helpers.tiny_batches import drop_pixels, tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class
from tests.helpers.tiny_models import TYPICAL, tiny_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    """Run no pass again for its seconds, which no test here compares."""
    monkeypatch.setattr("stageline.planner.estimate.SHORT_SECONDS", 0.0)


def maker(family, folder, *, tied=False, config=None, **options):
    """Builds pieces and whole stages of a tiny model that has a config and no weights."""
    (config or tiny_config(family, tied=tied)).save_pretrained(folder)
    stage_class = class_of_key(family)

    def make(**kwargs):
        paths = {"config_path": str(folder), "processor_path": None, "checkpoint_path": None}
        return stage_class.build(**paths, is_piece=True, **options, **kwargs)[0]

    return make


def loss_of(output, batch):
    return sft(output, batch, num_targets=torch.tensor(10.0))


def workload(family):
    batch = tiny_micro_batches(family, lengths=(20,))[0]
    return Workload(batch, lambda model: loss_of, CPU, repeats=1)


@pytest.mark.parametrize("family", TYPICAL)
def test_the_items_are_the_whole_model(family, tmp_path):
    outline = outline_of(maker(family, tmp_path))
    whole = auto_class(family).from_config(tiny_config(family))
    items = sum((outline.first, *outline.layers), outline.last)
    assert items.num_parameters == sum(p.numel() for p in whole.parameters())
    assert items.weights == 4 * items.num_parameters == items.gradients
    assert outline.tied.num_parameters == 0


def test_a_tied_table_is_in_both_ends_and_layers_of_one_kind_are_measured_once(tmp_path):
    outline = outline_of(maker("llama", tmp_path, tied=True))
    whole = auto_class("llama").from_config(tiny_config("llama", tied=True))
    items = sum((outline.first, *outline.layers), outline.last)
    assert outline.tied.num_parameters == whole.get_input_embeddings().weight.numel()
    assert items.num_parameters - outline.tied.num_parameters == whole.num_parameters()
    assert outline.kinds == (0, 0, 0, 0)
    # sliding and full attention in turn
    assert outline_of(maker("gemma3", tmp_path)).kinds == (0, 1, 0, 1)
    # the first layer with LoRA has nothing trained before it
    assert outline_of(maker("llama", tmp_path, llm_lora_num=1)).kinds == (0, 1, 1, 1)


def test_frozen_parts_have_no_backward_pass(tmp_path):
    make = maker("internvl", tmp_path, frozen_vit=True, frozen_mlp=True, llm_lora_num=1)
    costs = measure(outline_of(make), workload("internvl"))
    assert costs.first.forward > 0 and costs.first.backward == costs.first.saved == 0
    assert costs.layers[0].input_grad == 0 < costs.layers[0].backward  # nothing to send it to
    assert costs.layers[1].input_grad > 0
    assert costs.layers[1].gradients == 4 * costs.layers[1].num_trainable > 0
    assert costs.layers[1].num_trainable < costs.layers[1].num_parameters / 2


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_half_precision_has_masters(precision, tmp_path):
    layer = outline_of(maker("llama", tmp_path, dtype=precision)).layers[0]
    is_half = precision == torch.bfloat16
    assert layer.weights == layer.num_parameters * (2 if is_half else 4)
    assert layer.masters == (4 * layer.num_parameters if is_half else 0)


def wide_config(family):
    """Wide enough that activations count, not the odd bytes of masks."""
    return tiny_config(family, hidden_size=64, intermediate_size=160, vocab_size=512)


KINDS = {"full": {}, "lora": {"llm_lora_num": 1}, "recomputed": {"gradient_checkpointing": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_predicted_activations_are_those_of_a_running_stage(kind, tmp_path):
    """The independent figure: live bytes while a real stage runs 1F1B's warm-up and a backward."""
    make = maker("llama", tmp_path, config=wide_config("llama"), **KINDS[kind])
    costs = measure(outline_of(make), workload("llama"))
    rules = MemoryRules(optimizer_bytes=8)
    schedule = make_schedule("1f1b", num_ranks=2)
    ranks = rank_memory(costs, [2, 2], schedule, num_micro_batches=4, rules=rules)
    for stage, memory in enumerate(ranks):
        model = make(stage=stage, num_stages=2, partition=[2, 2], device=CPU)
        found = live_bytes_of(model, workload("llama").batch, in_flight=2 - stage)
        assert memory.activations == pytest.approx(found, rel=0.1)
        assert memory.weights == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_few_bit_experts_take_what_is_planned(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "vocab_size": 512}
    config = tiny_config("qwen3_moe", **sizes)
    lora = {"llm_lora_num": 1, "frozen_lm_head": True}
    lora["lora_target"] = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
    make = maker("qwen3_moe", tmp_path, config=config, **lora)
    plain = outline_of(make)
    make = functools.partial(make, methods=Methods(quantization=Quantization(kind)))
    outline = outline_of(make)
    for ours, expected in zip(
        estimate(outline, shape=(1, 20)).layers, estimate(plain, shape=(1, 20)).layers, strict=True
    ):
        assert ours.saved == expected.saved > 0
        assert ours.num_parameters == expected.num_parameters
        assert ours.weights < 0.5 * expected.weights
    costs = measure(outline, workload("qwen3_moe"))
    (memory,) = rank_memory(
        costs,
        [4],
        make_schedule("1f1b", num_ranks=1),
        num_micro_batches=1,
        rules=MemoryRules(optimizer_bytes=8),
    )
    model = make(stage=0, num_stages=1, partition=[4], device=CPU)
    held = [*model.parameters(), *make_scales_parameters(model, {})]
    taken = sum(tensor.nbytes for tensor in held)
    assert memory.weights == pytest.approx(taken, rel=0.05)
    found = live_bytes_of(model, workload("qwen3_moe").batch, in_flight=1)
    assert memory.activations == pytest.approx(found, rel=0.05)


def live_bytes_of(model, batch, *, in_flight):
    passes = StagePasses(
        model, computes_grad=True, sends_grad=model.stage > 0, saving=torch.enable_grad
    )
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    shape = batch["input_ids"].shape
    grads = None if model.is_last else filled(model.get_example_output(*shape))

    def forward(index):
        came = (batch["input_ids"],) if model.is_first else filled(model.get_example_input(*shape))
        own = inputs if model.is_first else drop_pixels(inputs)
        loss = (lambda output: loss_of(output, batch)) if model.is_last else None
        passes.forward(index, came, own, loss_of=loss)

    forward(0)
    passes.backward(0, Kind.BACKWARD, grads)  # gradients are there from now on
    meter = PeakBytes(CPU)
    with meter.watch():
        for index in range(in_flight):
            forward(index)
        passes.backward(0, Kind.BACKWARD, grads)
    return meter.peak


def filled(metas):
    return tuple(torch.randn(meta.shape, dtype=meta.dtype) for meta in metas)


def test_the_estimate_has_exact_weights_and_fair_activations(tmp_path):
    outline = outline_of(maker("llama", tmp_path, config=wide_config("llama")))
    batch = workload("llama")
    measured, rough = (
        measure(outline, batch),
        estimate(outline, shape=tuple(batch.batch["input_ids"].shape)),
    )
    for split in ([2, 2], [1, 3]):
        for a, b in zip(measured.stages(split), rough.stages(split), strict=True):
            assert (a.weights, a.gradients) == (b.weights, b.gradients)
            assert 0.4 < b.saved / a.saved < 1.1


def test_the_optimizer_is_asked_for_its_bytes():
    def make(optimizer_class, **options):
        return lambda parameters: optimizer_class(parameters.values(), lr=0.1, **options)

    assert probe_optimizer(make(torch.optim.AdamW), CPU).optimizer_bytes == 8
    assert probe_optimizer(make(torch.optim.SGD, momentum=0.9), CPU).optimizer_bytes == 4


def test_live_bytes_are_freed_and_views_are_not_counted():
    old = torch.ones(1000)
    meter = PeakBytes(CPU)
    with meter.watch():
        kept = old * 2
        gone = kept + old
        del gone
        _ = kept.view(10, 100), old.view(10, 100), old.add_(1)
    assert (meter.peak, meter.kept) == (8000, 4000)


def test_a_piece_may_be_empty_and_a_stage_may_not(tmp_path):
    make = maker("llama", tmp_path)
    assert len(make(stage=1, num_stages=3, partition=[2, 0, 2], device="meta").layers) == 0
    with pytest.raises(UserError, match="at least 1"):
        CausalLMStage(tiny_config("llama"), stage=1, num_stages=3, partition=[2, 0, 2])


def test_the_first_stage_keeps_what_its_images_make(tmp_path):
    found = outline_of(maker("internvl", tmp_path, visual_gpu_ratio=0.0))
    costs = measure(found, workload("internvl"))
    alone = drop_pixels(workload("internvl").batch)
    alone["input_ids"] = alone["input_ids"].clamp(min=9)  # no image token either
    without = measure(found, Workload(alone, lambda model: loss_of, CPU, repeats=1))
    kept_once = costs.first.saved - without.first.saved
    assert kept_once > 10 * 4 * 16 * 16  # hidden states of 2 tiles, in 2 blocks, several times
    assert costs.layers[0].saved == without.layers[0].saved


# -- models that are not there, on cards that are not there ---------------------------------

CONFIGS = Path(__file__).resolve().parents[2] / "data/configs"
PUBLISHED = {  # parameters, as the makers' own model files add up
    **{"Qwen2.5-0.5B": 494_032_768, "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-32B": 32_763_876_352},
    **{"Qwen2.5-72B": 72_706_203_648, "Llama-3.1-8B": 8_030_261_248},
    **{"Llama-3.1-70B": 70_553_706_496, "Mistral-7B-v0.3": 7_248_023_552},
    **{"gemma-2-9b": 9_241_705_984, "phi-4": 14_659_507_200, "Qwen3-30B-A3B": 30_532_122_624},
    **{
        "Qwen2.5-VL-7B": 8_292_166_656,
        "InternVL3-8B": 7_944_373_760,
        "gpt-oss-20b": 20_914_757_184,
    },
    # text models; added up by hand, as their layers are in docs/plan_table.md
    **{"GLM-4.7-Flash": 29_943_390_976, "Qwen3.5-35B-A3B": 34_660_610_688},
    "Gemma-4-26B-A4B": 25_233_141_760,
}


def test_the_written_configs_have_the_published_number_of_parameters():
    found = {}
    for folder in CONFIGS.iterdir():
        config = AutoConfig.from_pretrained(folder)
        is_visual = hasattr(config, "vision_config")
        auto = AutoModelForImageTextToText if is_visual else AutoModelForCausalLM
        with torch.device("meta"):
            found[folder.name] = auto.from_config(config).num_parameters()
    assert found == PUBLISHED


def test_passes_that_are_counted_are_those_that_are_run(tmp_path):
    config = wide_config("llama")
    outline, batch = outline_of(maker("llama", tmp_path, config=config)), workload("llama")
    counted, measured = count(outline, batch, flops_per_second=1.0), measure(outline, batch)
    pairs = [(counted.first, measured.first), (counted.last, measured.last)]
    for ours, real in [*pairs, *zip(counted.layers, measured.layers, strict=True)]:
        assert (ours.saved, ours.weights, ours.masters) == (real.saved, real.weights, real.masters)
        assert ours.transient == pytest.approx(real.transient, rel=0.02, abs=2000)
    rows, tokens = batch.batch["input_ids"].shape
    width, ffn = config.hidden_size, config.intermediate_size
    keys = width // config.num_attention_heads * config.num_key_value_heads
    products = 2 * (2 * width * width + 2 * width * keys + 3 * width * ffn) * tokens
    attention = 4 * width * tokens**2
    assert counted.layers[0].forward == rows * (products + attention)
    # attention once more for its scores, of two products each way
    assert counted.layers[1].backward == rows * (2 * products + 2.5 * attention)


def test_a_7b_model_on_eight_cards_by_hand():
    """Full training: 2 bytes of weight, 4 of gradient, 4 of master, 8 of moments."""
    config = AutoConfig.from_pretrained(CONFIGS / "Qwen2.5-7B")
    width, ffn, keys = config.hidden_size, config.intermediate_size, 512
    layer = 2 * width * width + width + 2 * (width * keys + keys) + 3 * width * ffn + 2 * width
    table = config.vocab_size * width

    def make(**given):
        paths = {"config_path": str(CONFIGS / "Qwen2.5-7B"), "processor_path": None}
        bf16 = {"dtype": torch.bfloat16, "is_piece": True, "checkpoint_path": None}
        return CausalLMStage.build(**paths, **bf16, gradient_checkpointing=True, **given)[0]

    costs = estimate(outline_of(make), shape=(1, 2048))
    split = [3, 4, 4, 4, 4, 4, 3, 2]
    schedule = make_schedule("1f1b", num_ranks=8)
    ranks = rank_memory(costs, split, schedule, num_micro_batches=32, rules=MemoryRules(8.0))
    held = [count * layer for count in split]
    held[0] += table
    held[-1] += table + width
    assert sum(held) == PUBLISHED["Qwen2.5-7B"]
    assert [rank.lasting for rank in ranks] == [18 * count for count in held]
    # 8 micro-batches are under way on rank 0, each with the input and the output of its layers
    border = 2048 * width * 2
    assert ranks[0].activations >= 8 * 4 * border
    assert max(rank.peak for rank in ranks) < 80e9 * 0.95
