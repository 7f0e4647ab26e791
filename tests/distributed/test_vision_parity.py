"""Every vision-language family against plain transformers, with 0, 1 and several images in a row.

Micro-batches come from real processors and the collate part; one of them has no image at all. The
reference is the unsplit model in float64, with peft where the tower has LoRA. Stages run one after
the other in one process; real pipelines run once for each family and schedule.
"""

import contextlib
import copy
import functools

import pytest
import torch
import transformers

from loss_fn import sft
from pp_models import class_of_key
from prompt_fn import auto, fill
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.stages.vision_language import VisionLanguageStage
from tests.helpers.chain import evaluate_chain, run_chain
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import count_targets, drop_pixels
from tests.helpers.tiny_models import VISION_LANGUAGE, tiny_config, tiny_processor
from tests.helpers.tiny_vision_batches import vision_micro_batches

FLOAT64 = torch.float64
MODES = ("full", "frozen", "lora")
SCHEDULES = {"1f1b": 3, "zbv": 2}
RANK, ALPHA = 2, 4.0


@pytest.fixture(scope="module", autouse=True)
def true_float64():
    """Remove the float32 islands (norms, softmax) of transformers, for reference and stages."""
    to_float, softmax = torch.Tensor.float, torch.nn.functional.softmax

    def keep_double(tensor):
        return tensor if tensor.dtype == FLOAT64 else to_float(tensor)

    def softmax_as_input(tensor, dim=None, dtype=None, **kwargs):
        return softmax(tensor, dim=dim, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", keep_double)
        patch.setattr(torch.nn.functional, "softmax", softmax_as_input)
        yield


def is_of_tower(family, name):
    """Written down here, so that parts() of the stages is tested, too."""
    if family.startswith("qwen"):
        return name.startswith("model.visual.") and "merger" not in name
    return name.startswith(("model.vision_tower.", "model.vision_model."))


# -- the reference ---------------------------------------------------------------------------


@functools.cache
def processor_of(family):
    try:
        return tiny_processor(family)
    except ImportError as error:  # older releases of transformers need torchvision for some
        pytest.skip(str(error))


def families_here():
    """Return the families that this release of transformers can build."""
    found = []
    for family in VISION_LANGUAGE:
        with contextlib.suppress(pytest.skip.Exception):
            processor_of(family)
            found.append(family)
    return found


@functools.cache
def micro_batches_of(family, turned=None):
    """`turned`: the number of the image that is upside down and the other way round."""
    return vision_micro_batches(
        processor_of(family),
        prompt_fn=fill,
        image_token=auto,
        dtype=FLOAT64,
        change=lambda index, image: image.rotate(180) if index == turned else image,
    )


@functools.cache
def whole_of(family):
    torch.manual_seed(3)
    vocab_size = len(processor_of(family).tokenizer)
    config = tiny_config(family, vocab_size=vocab_size, max_position_embeddings=256)
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=FLOAT64)
    with torch.no_grad():  # transformers starts biases and norms at 0 and 1, which hides mistakes
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return whole.train()


@functools.cache
def adapted_of(family):
    """Return the unsplit model with peft's adapters on the linear layers of the tower."""
    import peft  # peft looks for CUDA's own functions, which emulated cards lack

    whole = copy.deepcopy(whole_of(family))
    linear = [
        name
        for name, module in whole.named_modules()
        if isinstance(module, torch.nn.Linear) and is_of_tower(family, name)
    ]
    options = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=linear)
    adapted = peft.get_peft_model(whole, options)
    torch.manual_seed(4)
    for name, parameter in adapted.named_parameters():
        is_adapter = "lora_" in name
        parameter.requires_grad_(is_adapter or not is_of_tower(family, our_name(name)))
        if is_adapter:  # B starts at zero, which would hide A's gradient
            parameter.data = torch.randn_like(parameter, dtype=FLOAT64) * 0.2
    return adapted


def our_name(name):
    return (
        name.removeprefix("base_model.model.")
        .replace("lora_A.default", "lora.lora_A")
        .replace("lora_B.default", "lora.lora_B")
        .replace("base_layer", "lora_module")
    )


@functools.cache
def reference_of(family, mode, device="cpu"):
    """Return the results of transformers' model, on the CPU; it runs on `device`."""
    model = adapted_of(family) if mode == "lora" else whole_of(family)
    if device != "cpu":
        model = copy.deepcopy(model).to(device)
    if mode != "lora":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(mode == "full" or not is_of_tower(family, name))
    model.zero_grad()
    divisor = divisor_of(family).to(device)
    losses, logits = [], []
    for batch in micro_batches_of(family):
        batch = {name: value.to(device) for name, value in batch.items()}
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        made = model(**inputs, use_cache=False).logits
        labels = batch["labels"][:, 1:]
        is_target = labels != -100
        loss = torch.nn.functional.cross_entropy(
            made[:, :-1][is_target], labels[is_target], reduction="sum"
        )
        (loss / divisor).backward()
        losses.append((loss / divisor).detach().cpu())
        logits.append(made.detach().cpu())
    named = {our_name(name): p for name, p in model.named_parameters()}
    grads = {name: p.grad.cpu().clone() for name, p in named.items() if p.grad is not None}
    weights = {name: p.detach().cpu().clone() for name, p in named.items()}
    return {"losses": losses, "logits": logits, "grads": grads, "weights": weights}


def divisor_of(family):
    return torch.tensor(float(count_targets(micro_batches_of(family))), dtype=FLOAT64)


# -- the stages ------------------------------------------------------------------------------


@functools.cache
def stage_of(family, stage, num_stages, has_lora=False):
    """Return a stage that takes all values from the reference; loading is tested further below."""
    lora = {"vit_lora_num": 1, "lora_rank": RANK, "lora_alpha": ALPHA} if has_lora else {}
    model = class_of_key(family)(
        whole_of(family).config, stage=stage, num_stages=num_stages, dtype=FLOAT64, **lora
    )
    weights = reference_of(family, "lora" if has_lora else "full")["weights"]
    buffers = dict(whole_of(family).named_buffers())
    for path, module in model.named_modules():
        for leaf in module._parameters:
            value = weights.get(f"{path}.{leaf}" if path else leaf)
            if module._parameters[leaf] is not None:
                module._parameters[leaf] = torch.nn.Parameter(value.clone())
        for leaf in module._buffers:
            module._buffers[leaf] = buffers[f"{path}.{leaf}"].clone()
    return model


def stages_of(family, mode, num_stages):
    stages = [
        stage_of(family, index, num_stages, has_lora=mode == "lora" and index == 0)
        for index in range(num_stages)
    ]
    for model in stages:
        model.frozen_parts["vit"] = mode == "frozen"
        model.frozen()
        model.train()
        model.zero_grad()
    return stages


def loss_of(family, logits):
    """Return the loss of the loss_fn, and store its input in `logits`."""
    divisor = divisor_of(family)

    def loss_fn(output, batch):
        logits.append(output.detach())
        return sft(output, batch, num_targets=divisor)

    return loss_fn


def grads_of(stages):
    grads = {}
    for model in stages:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert name not in grads, f"{name} on two stages"
                grads[name] = parameter.grad
    return grads


def compare(made, expected):
    for what in ("losses", "logits"):
        for ours, theirs in zip(made[what], expected[what], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=what)
    assert set(made["grads"]) == set(expected["grads"])
    for name, grad in expected["grads"].items():
        torch.testing.assert_close(made["grads"][name], grad, rtol=0, atol=1e-9, msg=name)


def run_split(family, mode, num_stages):
    stages, logits = stages_of(family, mode, num_stages), []
    losses = run_chain(
        stages,
        micro_batches_of(family),
        loss_fn=loss_of(family, logits),
        splits_backward=num_stages % 2 == 0,
    )
    return {"losses": losses, "logits": logits, "grads": grads_of(stages)}


# -- the proof -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_stages_equal_the_unsplit_model(family, mode, num_stages):
    compare(run_split(family, mode, num_stages), reference_of(family, mode))


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_every_image_and_every_kind_of_row_is_there(family):
    """Check the basis of the comparison: no image is dropped silently, none is missing."""
    batches = micro_batches_of(family)
    assert ["pixel_values" in batch for batch in batches] == [True, False, True]
    image_id = processor_of(family).tokenizer.convert_tokens_to_ids(
        processor_of(family).image_token
    )
    has_image = [(batch["input_ids"] == image_id).any(dim=1).tolist() for batch in batches]
    assert has_image == [[True, False, True], [False, False], [True, True]]
    stages = stages_of(family, "full", 2)
    loss_fn = loss_of(family, [])
    before = evaluate_chain(stages, batches, loss_fn=loss_fn)
    for number, place in enumerate([0, 0, 0, 2, 2, 2, 2]):
        after = evaluate_chain(stages, micro_batches_of(family, number), loss_fn=loss_fn)
        differs = [float((a - b).abs()) > 1e-7 for a, b in zip(after, before, strict=True)]
        assert differs == [index == place for index in range(3)], f"image {number}"


def real_pipelines(rank, schedule, families):
    """Run all families on the same ranks."""
    results = {}
    kind = make_schedule(schedule, num_ranks=SCHEDULES[schedule])
    for family in families:
        models = [
            stages_of(family, "full", kind.num_stages)[index] for index in kind.stages_of(rank)
        ]
        runner = PipelineRunner(models, device=torch.device("cpu"), schedule=kind)
        batches = micro_batches_of(family)
        if not any(model.is_first for model in models):
            batches = [drop_pixels(batch) for batch in batches]
        runner.step(batches, loss_fn=loss_of(family, []))
        results[family] = grads_of(models)
    return results


@pytest.fixture(scope="module", params=SCHEDULES)
def pipeline_results(request):
    families = families_here()
    for family in families:
        reference_of(family, "full")  # once, before the ranks part
    return run_ranks(real_pipelines, SCHEDULES[request.param], request.param, families)


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_real_pipelines_equal_the_unsplit_model(family, pipeline_results):
    processor_of(family)
    summed = {}
    for result in pipeline_results:
        assert not set(summed) & set(result[family])
        summed.update(result[family])
    expected = reference_of(family, "full")
    compare({"losses": [], "logits": [], "grads": summed}, {**expected, "losses": [], "logits": []})


# -- the proof can fail ----------------------------------------------------------------------


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_another_weight_of_the_tower_is_noticed(family):
    stages = stages_of(family, "full", 2)
    weight = stages[0].front_weights()[0]
    with torch.no_grad():
        weight.view(-1)[0] += 1e-3
    try:
        with pytest.raises(AssertionError):
            compare(run_split(family, "full", 2), reference_of(family, "full"))
    finally:
        with torch.no_grad():
            weight.view(-1)[0] -= 1e-3


def test_features_of_deeper_layers_that_get_lost_are_noticed(monkeypatch):
    run_spliced = VisionLanguageStage.run_spliced

    def without_features(self, run, came, **kwargs):
        kept = [
            tensor * 0 if place and tensor.is_floating_point() else tensor
            for place, tensor in enumerate(came)
        ]
        return run_spliced(self, run, tuple(kept), **kwargs)

    monkeypatch.setattr(VisionLanguageStage, "run_spliced", without_features)
    with pytest.raises(AssertionError, match="losses"):
        compare(run_split("qwen3_vl", "full", 3), reference_of("qwen3_vl", "full"))


def test_a_later_stage_of_gemma3_without_token_types_is_noticed():
    stages = stages_of("gemma3_vl", "full", 2)
    batches, logits = micro_batches_of("gemma3_vl"), []
    inputs_of = type(stages[1]).model_inputs

    def without_types(batch):
        inputs = inputs_of(stages[1], batch)
        return {name: value for name, value in inputs.items() if name != "token_type_ids"}

    stages[1].model_inputs = without_types
    try:
        losses = evaluate_chain(stages, batches, loss_fn=loss_of("gemma3_vl", logits))
    finally:
        del stages[1].model_inputs
    expected = reference_of("gemma3_vl", "full")["losses"]
    differs = [bool((a - b).abs() > 1e-7) for a, b in zip(losses, expected, strict=True)]
    assert differs == [True, False, True]
