"""Tokens of each expert, against a count by hand with plain transformers on the unsplit model."""

import json

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from commands.stages import stage_key
from loss_fn import sft
from pp_models import class_of_key
from stageline.checkpoint.load import fill_stage
from stageline.modules.quantised import Quantization, quantise_layers
from stageline.modules.recompute import compile_layers
from stageline.modules.router_records import ExpertTokens
from stageline.pipeline.runner import PipelineRunner, TorchPipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.shrink import shrink_config
from stageline.streaming.lanes import Lane
from stageline.streaming.runner import StreamingRunner, even_plan
from stageline.training.precision import MasterWeights
from stageline.training.step import TrainStep
from stageline.verify.batches import draw_text
from tests.helpers.family_configs import config_with_experts
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import Job

FAMILIES = (
    *("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma4_text", "olmoe"),
    *("qwen3_next", "llama4_text", "hunyuan_v1_moe", "phimoe", "nemotron_h", "dbrx"),
    *("longcat_flash", "ernie4_5_moe"),
)
NUM_LAYERS, NUM_MICRO_BATCHES = 4, 4
# above a few-bit base, and with adapters of experts, whose module is wrapped
LORA = {"llm_lora_num": 1, "lora_rank": 2, "lora_target": [r".*experts\.[a-z_]*proj", "q_proj"]}
LORA |= {"frozen_lm_head": True}


def make_whole(family, folder):
    torch.manual_seed(3)
    config = config_with_experts(family)
    whole = AutoModelForCausalLM.from_config(shrink_config(config, num_layers=NUM_LAYERS))
    with torch.no_grad():  # routers that start near zero choose at random
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(folder)
    return whole.eval()


def batches_of(config, *, is_packed=False, seed=0):
    """Return micro-batches of other lengths, with padding, or with two samples in a row."""
    made = []
    for index in range(NUM_MICRO_BATCHES):
        generator = torch.Generator().manual_seed(seed + index)
        batch = draw_text(config, 9 + 2 * index, 3 * (index % 2), generator=generator)
        if is_packed:
            mask_BT, half = batch["attention_mask"], 4
            places_BT = torch.arange(mask_BT.shape[1]).expand_as(mask_BT)
            samples_BT = (places_BT >= half).long()
            positions_BT = places_BT - half * samples_BT
            batch["position_ids"] = positions_BT.where(mask_BT == 1, 0)
            batch["sample_ids"] = samples_BT.where(mask_BT == 1, -1)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        made.append({**batch, "labels": labels})
    return made


@torch.no_grad()
def count_by_hand(whole, batches):
    """Return module -> tokens of each expert, one token after another."""
    found, chosen = {}, {}

    def note(name):
        def hook(module, args, kwargs, output):
            ids = [one for one in (*args, *kwargs.values()) if not one.is_floating_point()]
            if ids:
                chosen[name] = ids[0]
            else:  # llama4: of the router's logits
                chosen[name] = chosen[name.replace(".experts", ".router")]

        return hook

    def note_router(name, k):
        return lambda module, args, output: chosen.update({name: output[1].topk(k).indices})

    handles, sizes = [], {}
    for name, module in whole.named_modules():
        kind = type(module).__name__
        if kind.endswith("Experts"):
            handles.append(module.register_forward_hook(note(name), with_kwargs=True))
            sizes[name] = getattr(module, "num_routed_experts", 0) or module.num_experts
        elif kind == "Llama4Router":
            handles.append(module.register_forward_hook(note_router(name, module.top_k)))
    for batch in batches:
        inputs = {n: v for n, v in batch.items() if n not in ("labels", "sample_ids")}
        if "position_ids" in inputs:  # transformers reads the borders of samples off positions
            del inputs["attention_mask"]
        whole(**inputs, use_cache=False)
        for name, size in sizes.items():
            counts = found.setdefault(name, [0] * size)
            ids_NK = chosen[name].reshape(batch["input_ids"].numel(), -1).tolist()
            for is_real, experts in zip(batch["attention_mask"].flatten(), ids_NK, strict=True):
                for expert in experts if is_real else ():
                    if expert < size:
                        counts[expert] += 1
    for handle in handles:
        handle.remove()
    return found


def make_stage(folder, stage, num_stages, *, quantization=None, recompute=None, **options):
    config = AutoConfig.from_pretrained(folder)
    kind = class_of_key(stage_key(config))
    model = kind(config, stage=stage, num_stages=num_stages, **options)
    fill_stage(model, folder, dtype=torch.float32)
    if quantization is not None:
        layers = [layer for _, layer in model.layer_list()]
        quantise_layers(layers, quantization, dtype=torch.float32, device="cpu")
    if recompute:
        model.enable_gradient_checkpointing(mode=recompute)
    return model.train()


def make_step(runner, **options):
    return TrainStep(
        runner,
        make_optimizer=lambda named: torch.optim.SGD(list(named.values())) if named else None,
        loss_fn=sft,
        learning_rate=lambda step: 0.0,
        make_weights=getattr(runner, "make_weights", MasterWeights),
        **options,
    )


def count_split(
    rank, folder, name, *, num_ranks=1, each=None, kind=PipelineRunner, is_packed=False, **options
):
    """Run two steps, with an evaluation before each; return the counts of the second."""
    schedule = make_schedule(name, num_ranks=num_ranks, stages_per_rank=each)
    own = schedule.stages_of(rank)
    stages = [make_stage(folder, stage, schedule.num_stages, **options) for stage in own]
    if kind is StreamingRunner:
        runner = kind(stages, lanes=[Lane.cpu()], plan=even_plan(schedule.num_stages, 1))
    else:
        runner = kind(stages, device=torch.device("cpu"), schedule=schedule)
    train_step = make_step(runner)
    for seed in (50, 0):
        batches = batches_of(stages[0].config, is_packed=is_packed, seed=seed)
        runner.evaluate(batches, on_output=lambda *_: None)
        train_step(batches, step=0)
    return train_step.read_expert_tokens()


def alone(*args, **options):
    """Run the same in this process, with all stages of the model."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return count_split(0, *args, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_count_by_hand(family, tmp_path):
    whole = make_whole(family, tmp_path)
    expected = count_by_hand(whole, batches_of(whole.config))
    assert any(len(set(counts)) > 1 for counts in expected.values())
    found = alone(tmp_path, "interleaved_1f1b", each=NUM_LAYERS, recompute="full")
    assert found == expected and list(found) == list(expected)


CASES = {
    "stream": ("looped_bfs", {"each": NUM_LAYERS, "kind": StreamingRunner}),
    "stream recomputed": (
        "looped_bfs",
        {"each": NUM_LAYERS, "kind": StreamingRunner, "recompute": "full"},
    ),
    "packed": ("1f1b", {"is_packed": True}),
    "kept products": ("1f1b", {"recompute": "operators"}),
    "frozen": ("1f1b", {"frozen_llm": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_ways_of_running(case, tmp_path):
    name, options = CASES[case]
    whole = make_whole("qwen3_moe", tmp_path)
    batches = batches_of(whole.config, is_packed=case == "packed")
    expected = count_by_hand(whole, batches)
    assert alone(tmp_path, name, **options) == expected
    num_tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    top_k = whole.config.num_experts_per_tok
    assert {sum(counts) for counts in expected.values()} == {num_tokens * top_k}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_few_bit_experts_with_adapters(kind, tmp_path):
    """Adapters that start at zero change no choice; weights in few bits may, so only sums hold."""
    pytest.importorskip("bitsandbytes")
    whole = make_whole("qwen3_moe", tmp_path)
    expected = count_by_hand(whole, batches_of(whole.config))
    assert alone(tmp_path, "1f1b", **LORA) == expected
    found = alone(tmp_path, "1f1b", quantization=Quantization(kind), **LORA)
    assert found.keys() == expected.keys() and found["model.layers.0.mlp.experts"] != [0] * 4
    for name, counts in found.items():
        assert sum(counts) == sum(expected[name])


def count_all(rank, folder, num_ranks):
    names = {2: ("1f1b", "zbv"), 4: ("1f1b",)}[num_ranks]
    found = [count_split(rank, folder, name, num_ranks=num_ranks) for name in names]
    torch_kind = {"kind": TorchPipelineRunner, "recompute": "full"}
    return [*found, count_split(rank, folder, "1f1b", num_ranks=num_ranks, **torch_kind)]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_over_ranks(family, num_ranks, tmp_path):
    whole = make_whole(family, tmp_path)
    expected = count_by_hand(whole, batches_of(whole.config))
    for found in run_ranks(count_all, num_ranks, tmp_path, num_ranks):
        for counts in found:
            assert counts == expected and list(counts) == list(expected)


def test_compiled_layers_stay_one_graph(tmp_path):
    make_whole("qwen3_moe", tmp_path)
    stage = make_stage(tmp_path, 0, 1)
    compile_layers(stage.layer_list()[1:], backend="eager")
    hooked = {name for name, module in stage.named_modules() if module._forward_pre_hooks}
    ExpertTokens([stage])
    now = {name for name, module in stage.named_modules() if module._forward_pre_hooks}
    assert now - hooked == {"model.layers.0.mlp.experts"}


def test_nothing_is_exchanged_without_experts(tmp_path):
    make_whole("qwen3", tmp_path)
    stage = make_stage(tmp_path, 0, 1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train_step = make_step(PipelineRunner([stage], device=torch.device("cpu")))
    assert not any(module._forward_pre_hooks for module in stage.modules())
    assert train_step.read_expert_tokens() == {}
    train_step.replicas = None  # a second call gathers nothing
    assert train_step.read_expert_tokens() == {}


def test_a_run_of_two_replicas_logs_the_load(tmp_path):
    """The figures follow from the counts, and these add up to the tokens of both replicas."""
    job = Job(tmp_path, family="qwen3_moe", num_layers=4)
    halves = ("--dp-degree", 2, "--batch-size", 2, "--micro-batch-size", 1)
    text = job.train("two", "--total-steps", 3, *halves, "--num-stages", 2, ranks=4).out
    alone_text = job.train("one", "--total-steps", 3, "--batch-size", 4, ranks=1).out
    top_k = AutoConfig.from_pretrained(job.model).num_experts_per_tok
    told = {}
    for name, out in (("two", text), ("one", alone_text)):
        lines = (job.folder / name / "expert_tokens.jsonl").read_text().splitlines()
        records, tokens = job.records(name), list(map(json.loads, lines))
        told[name] = tokens
        assert [one["step"] for one in tokens] == [1, 2, 3]
        for record, own in zip(records, tokens, strict=True):
            own.pop("step")
            assert list(own) == [f"model.layers.{layer}.mlp.experts" for layer in range(4)]
            for layer, counts in enumerate(own.values()):
                assert sum(counts) == record["num_tokens"] * top_k
                load = max(counts) / (sum(counts) / len(counts))
                assert record["expert_load_by_layer"][str(layer)] == pytest.approx(load, abs=6e-4)
                idle = sum(count == 0 for count in counts) / len(counts)
                assert record["idle_experts_by_layer"][str(layer)] == pytest.approx(idle, abs=6e-5)
            assert record["expert_load"] == max(record["expert_load_by_layer"].values())
        assert f"| expert_load {records[0]['expert_load']:.2f} |" in out
    assert told["two"][0] == told["one"][0], "replicas share the rows of a step"
