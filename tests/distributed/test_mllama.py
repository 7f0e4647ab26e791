"""Mllama split into stages against transformers' whole model, in float64.

Most combinations are chained in one process, with the tensors cut off at each border as a pipeline
does; a real pipeline runs two schedules.
"""

import pytest
import torch
import transformers

from pp_models import CrossAttentionStage
from stageline.checkpoint.load import load_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_mllama import mllama_micro_batch
from tests.helpers.tiny_models import CROSS_LAYERS, tiny_mllama_config

PARTITIONS = {1: [5], 2: [2, 3], 3: [1, 1, 3], 4: [1, 1, 2, 1]}
# images of each row: one each, none at all, several, rows without one, only one row
IMAGES = ((1, 1), (0, 0), (2, 1), (3, 0), (0, 1), (1, 2))
FROZEN = {"frozen_vit": True, "frozen_mlp": True}
LORA = {
    **{"lora_rank": 2, "lora_alpha": 4.0, "frozen_lm_head": True},
    **{"vit_lora_num": 1, "mlp_lora_num": 1, "llm_lora_num": 1},
}
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a whole model with open gates: transformers' start at zero, which hides all images."""
    torch.manual_seed(3)
    whole = transformers.AutoModelForImageTextToText.from_config(
        tiny_mllama_config(), dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, parameter in whole.named_parameters():
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(0.7)
    path = tmp_path_factory.mktemp("mllama")
    whole.save_pretrained(path)
    return path


def load_whole(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)


def build_stages(folder, num_stages, *, partition=None, only=None, **kwargs):
    config = transformers.AutoConfig.from_pretrained(folder)
    stages = []
    for stage in range(num_stages) if only is None else only:
        model = CrossAttentionStage(
            config,
            stage=stage,
            num_stages=num_stages,
            partition=partition or PARTITIONS[num_stages],
            dtype=torch.float64,
            **kwargs,
        )
        load_split_model(model, folder, device="cpu", dtype=torch.float64, seed=0)
        model.frozen()
        stages.append(model.train())
    return stages


def micro_batches():
    lengths = (14, 11, 19, 12, 16, 13)
    return [
        mllama_micro_batch(images, length=length, seed=40 + length)
        for images, length in zip(IMAGES, lengths, strict=True)
    ]


def count_targets(batches):
    return torch.tensor(float(sum((b["labels"][:, 1:] != -100).sum() for b in batches)))


def loss_of(logits, batch):
    """Return the loss in the dtype of the logits: transformers' own works in float32."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def library_run(whole, batches):
    """Return losses and the gradients of what trains, summed over micro-batches."""
    count = count_targets(batches)
    losses = []
    for batch in batches:
        inputs = {n: v for n, v in batch.items() if n != "labels"}
        loss = loss_of(whole(**inputs, use_cache=False).logits, batch) / count
        loss.backward()
        losses.append(loss.item())
    grads = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    return losses, grads


def for_stage(batch, stage):
    return {n: v for n, v in batch.items() if stage == 0 or not n.startswith("pixel")}


def chained_run(stages, batches):
    """The same by stages, as a pipeline does it: every border is cut and its shape looked at."""
    count = count_targets(batches)
    losses = []
    for batch in batches:
        values, borders = (batch["input_ids"],), []
        for model in stages:
            own = for_stage(batch, model.stage)
            shapes = [(tuple(v.shape), v.dtype) for v in values]
            assert shapes == [(tuple(m.shape), m.dtype) for m in model.get_batch_input(own)]
            inputs = {n: v for n, v in own.items() if n != "labels"}
            output = model(*values, **inputs)
            made = output if isinstance(output, tuple) else (output,)
            shapes = [(tuple(v.shape), v.dtype) for v in made]
            if not model.is_last:
                assert shapes == [(tuple(m.shape), m.dtype) for m in model.get_batch_output(own)]
            values = tuple(v.detach().requires_grad_() for v in made)
            borders.append((made, values))
        loss = loss_of(borders[-1][0][0], batch) / count
        losses.append(loss.item())
        loss.backward()
        for made, cut in borders[-2::-1]:
            pairs = [(m, c.grad) for m, c in zip(made, cut, strict=True) if m.requires_grad]
            pairs = [(m, torch.zeros_like(m) if g is None else g) for m, g in pairs]
            torch.autograd.backward([m for m, _ in pairs], [g for _, g in pairs])
    return losses


def assert_equal_grads(stages, grads):
    seen = set()
    for model in stages:
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                expected = grads.get(name)
                assert expected is None or not expected.any(), name
                continue
            seen.add(name)
            assert (parameter.grad - grads[name]).abs().max() < TOLERANCE, name
    return seen


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["full", "frozen"])
def test_stages_equal_the_whole_model(folder, num_stages, kind):
    kwargs = FROZEN if kind == "frozen" else {}
    whole, batches = load_whole(folder).train(), micro_batches()
    for name, parameter in whole.named_parameters():
        is_image = "vision_model" in name or "multi_modal_projector" in name
        parameter.requires_grad_(not (kind == "frozen" and is_image))
    expected, grads = library_run(whole, batches)
    stages = build_stages(folder, num_stages, **kwargs)
    losses = chained_run(stages, batches)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < TOLERANCE
    seen = assert_equal_grads(stages, grads)
    assert any("vision_model" in name for name in seen) is (kind == "full")
    for layer in CROSS_LAYERS:
        name = f"model.language_model.layers.{layer}.cross_attn_attn_gate"
        assert grads[name].abs() > 1e-6, "the images must matter, or the test shows nothing"


LINEAR = r".*\.(fc1|fc2|multi_modal_projector|\w+_proj)"


def our_name(name):
    """Return our name of a parameter of peft."""
    return (
        name.removeprefix("base_model.model.")
        .replace("lora_A.default", "lora.lora_A")
        .replace("lora_B.default", "lora.lora_B")
        .replace("base_layer", "lora_module")
    )


@pytest.mark.parametrize("num_stages", [1, 3, 4])
def test_lora_in_tower_and_decoder_equals_peft(folder, num_stages):
    import peft  # peft looks for CUDA's own functions, which emulated cards lack

    whole = peft.get_peft_model(
        load_whole(folder), peft.LoraConfig(r=2, lora_alpha=4.0, target_modules=LINEAR)
    ).double()
    for name, parameter in whole.named_parameters():
        if "lora_" in name:  # B starts at zero, which would hide A's gradient
            torch.nn.init.normal_(parameter, std=0.1)
    start = {our_name(n): p for n, p in whole.named_parameters() if p.requires_grad}
    batches = micro_batches()
    expected, grads = library_run(whole.train(), batches)
    stages = build_stages(folder, num_stages, **LORA)
    own = {}
    for model in stages:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(start[name])
                own[name] = parameter
    assert own.keys() == start.keys()
    losses = chained_run(stages, batches)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < TOLERANCE
    assert_equal_grads(stages, {our_name(name): grad for name, grad in grads.items()})


def test_states_go_as_far_as_a_layer_attends_to_them(folder):
    batch = mllama_micro_batch((2, 0))
    states = ((2 * 2 * 4, 5, 16), torch.float64)
    for partition, takes in (
        ([1, 1, 2, 1], [False, True, True, False]),
        ([4, 1], [False, False]),
        ([1, 1, 1, 1, 1], [False, True, True, True, False]),
    ):
        stages = build_stages(folder, len(partition), partition=partition)
        for model, expected in zip(stages, takes, strict=True):
            metas = [(tuple(m.shape), m.dtype) for m in model.get_batch_input(batch)]
            assert (metas[-1] == states) is expected
            assert len(metas) == 1 + expected
            no_image = mllama_micro_batch((0, 0))
            assert len(model.get_batch_input(no_image)) == 1
            example = model.get_example_input(2, 14)
            one_each = model.get_batch_input(mllama_micro_batch((1, 1)))
            assert [t.shape for t in example] == [t.shape for t in one_each]


def on_rank(rank, folder, name, num_ranks, kwargs):
    schedule = make_schedule(name, num_ranks=num_ranks)
    partition = [1, 1, 2, 1] if schedule.num_stages == 4 else PARTITIONS[schedule.num_stages]
    models = build_stages(
        folder,
        schedule.num_stages,
        partition=partition,
        only=schedule.stages_of(rank),
        **kwargs,
    )
    runner = PipelineRunner(models, device=torch.device("cpu"), schedule=schedule)
    batches = [for_stage(batch, rank) for batch in micro_batches()]
    count = count_targets(batches)
    runner.step(batches, loss_fn=lambda logits, batch: loss_of(logits, batch) / count)
    return {n: p.grad for m in models for n, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name, num_ranks, kwargs",
    [("1f1b", 4, {}), ("zbv", 2, {}), ("interleaved_zero_bubble", 2, FROZEN)],
)
def test_a_pipeline_equals_the_whole_model(folder, name, num_ranks, kwargs):
    whole = load_whole(folder).train()
    for key, parameter in whole.named_parameters():
        is_image = "vision_model" in key or "multi_modal_projector" in key
        parameter.requires_grad_(not (kwargs and is_image))
    _, grads = library_run(whole, micro_batches())
    found = {}
    for own in run_ranks(on_rank, num_ranks, folder, name, num_ranks, kwargs):
        found.update(own)
    assert found.keys() == grads.keys()
    for key, grad in grads.items():
        assert (found[key] - grad).abs().max() < TOLERANCE, key
