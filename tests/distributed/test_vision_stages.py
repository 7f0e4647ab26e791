"""A vision tower on stages of its own: equal to the whole model of the library, for every family.

Most cases chain all stages in this process, with the engine's own passes and borders.
"""

from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn

from loss_fn import sft
from pp_models import DeepstackStage, VisionLanguageStage
from pp_models.vision_language import MultimodalRotaryStage
from stageline.checkpoint.load import load_split_model
from stageline.pipeline.actions import Kind
from stageline.pipeline.plan import grad_flow
from stageline.pipeline.stage_passes import StagePasses, model_inputs
from stageline.testing.tiny_batches import count_targets, drop_pixels
from stageline.testing.tiny_models import IMAGE_TOKEN_ID, VISION_LANGUAGE, VOCAB_SIZE, tiny_config

FAMILIES = VISION_LANGUAGE
NUM_BLOCKS = 3
IMAGES = ((1, 1), (2, 1, 0), (0, 0), (3,))  # of each row of each micro-batch
WHOLE_TOWER = ("vision_tower", "visual", "vision_model")
SPLITS = ((1, 2), (1, 4), (2, 3), (2, 4), (3, 4))  # vision stages, stages


def config_of(family, *, tied=False):
    config = tiny_config(family, tied=tied)
    vision = config.vision_config
    setattr(vision, "depth" if hasattr(vision, "depth") else "num_hidden_layers", NUM_BLOCKS)
    return config


def stage_class(family):
    if family == "qwen3_vl":
        return DeepstackStage
    return MultimodalRotaryStage if family.startswith("qwen") else VisionLanguageStage


def batch_of(family, images, *, seed, dtype=torch.float64):
    """A micro-batch whose rows have so many images; Qwen's are of unequal sizes."""
    generator = torch.Generator().manual_seed(seed)
    grids = [[(1, 4, 4 + 2 * (k % 3)) for k in range(count)] for count in images]
    lengths = [[h * w // 4 if family.startswith("qwen") else 4 for _, h, w in row] for row in grids]
    width = 14 + max(sum(row) for row in lengths)
    ids = torch.randint(9, VOCAB_SIZE, (len(images), width), generator=generator)
    for row, row_lengths in enumerate(lengths):
        start = 2
        for length in row_lengths:
            ids[row, start : start + length] = IMAGE_TOKEN_ID
            start += length + 1
    mask = torch.ones_like(ids)
    mask[-1, width - 3 :] = 0
    labels = torch.where((torch.rand(ids.shape, generator=generator) < 0.5) & (ids > 8), ids, -100)
    labels[mask == 0] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    num_images = sum(images)

    def pixels(*shape):
        return {"pixel_values": torch.randn(*shape, generator=generator).to(dtype)}

    if family.startswith("qwen"):
        batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN_ID).long()
        if num_images:
            grid = torch.tensor([each for row in grids for each in row])
            batch |= pixels(int(grid.prod(-1).sum()), 96) | {"image_grid_thw": grid}
    elif family in ("idefics3", "smolvlm") and num_images:
        batch |= pixels(len(images), max(images), 3, 16, 16)
        for row, count in enumerate(images):
            batch["pixel_values"][row, count:] = 0  # what the processor pads with
    elif family == "llava_next" and num_images:
        # so flat that of its tiles only the overview has tokens
        sizes = torch.tensor([[2, 24]] * num_images)
        batch |= pixels(num_images, 3, 3, 16, 16) | {"image_sizes": sizes}
    elif num_images:
        batch |= pixels(num_images, 3, 16, 16)
    if family == "gemma3_vl":
        batch["token_type_ids"] = (ids == IMAGE_TOKEN_ID).long()
    return batch


class Lora(nn.Module):
    """The reference's own adapter, with the names of ours."""

    def __init__(self, linear):
        super().__init__()
        self.lora_module = linear
        self.lora = nn.ModuleDict(
            {
                "lora_A": nn.Linear(linear.in_features, 2, bias=False),
                "lora_B": nn.Linear(2, linear.out_features, bias=False),
            }
        )

    @property
    def weight(self):
        return self.lora_module.weight

    def forward(self, x):
        return self.lora_module(x) + 2.0 * self.lora["lora_B"](self.lora["lora_A"](x))


def is_of_tower(name):
    """The projectors of Qwen lie in its tower."""
    is_inside = any(f".{tower}." in name for tower in WHOLE_TOWER)
    return is_inside and "merger" not in name


def wrap_tower(whole):
    for name, module in list(whole.named_modules()):
        if is_of_tower(name) and isinstance(module, nn.Linear):
            whole.set_submodule(name, Lora(module))


def build_whole(family, variant, folder, *, tied=False):
    torch.manual_seed(3)
    config = config_of(family, tied=tied)
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    with torch.no_grad():  # the library starts biases and norms at 0 and 1, which hides mistakes
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(folder)
    if variant == "lora":
        wrap_tower(whole)
    whole.double().train()
    for name, parameter in whole.named_parameters():
        is_tower = is_of_tower(name)
        if variant == "frozen":
            parameter.requires_grad_(not is_tower)
        if variant == "lora" and is_tower:
            parameter.requires_grad_(".lora_A." in name or ".lora_B." in name)
    return whole


def build_stages(family, variant, folder, whole, *, vision_stages, num_stages, **kwargs):
    options = {"full": {}, "frozen": {"frozen_vit": True}}.get(variant)
    if options is None:
        options = {"vit_lora_num": 1, "lora_rank": 2, "lora_alpha": 4.0}
    values = dict(whole.named_parameters())
    stages = []
    for stage in range(num_stages):
        model = stage_class(family)(
            transformers.AutoConfig.from_pretrained(folder),
            stage=stage,
            num_stages=num_stages,
            vision_stages=vision_stages,
            dtype=torch.float64,
            **options,
            **kwargs,
        )
        load_split_model(model, folder, device="cpu", dtype=torch.float64)
        model.frozen()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
        stages.append(model.train())
    return stages


def chain(stages, micro_batches, *, splits_backward=False):
    """Forward and backward of all micro-batches through all stages; the summed loss."""
    flow = grad_flow([any(p.requires_grad for p in model.parameters()) for model in stages])
    passes = [
        StagePasses(
            model, computes_grad=flow.computes[k], sends_grad=flow.sends[k], saving=nullcontext
        )
        for k, model in enumerate(stages)
    ]
    divisor = torch.tensor(float(count_targets(micro_batches)), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for batch in micro_batches:
        sent = (batch["input_ids"],)
        for k, model in enumerate(stages):
            here = batch if k == 0 else drop_pixels(batch)
            expected = [(tuple(meta.shape), meta.dtype) for meta in model.get_batch_input(here)]
            assert [(tuple(value.shape), value.dtype) for value in sent] == expected
            loss_of = None
            if model.is_last:
                loss_of = lambda output, batch=batch: sft(output, batch, num_targets=divisor)  # noqa: E731
            sent = passes[k].forward(0, sent, model_inputs(here), loss_of=loss_of)
        total += sent[0].detach()
        grads = None
        for k in reversed(range(len(stages))):
            if not flow.computes[k]:
                assert not grads
                continue
            if splits_backward and flow.sends[k]:
                grads = passes[k].backward(0, Kind.INPUT_GRAD, grads)
                passes[k].backward(0, Kind.WEIGHT_GRAD, None)
            else:
                grads = passes[k].backward(0, Kind.BACKWARD, grads)
    return total


def reference_loss(whole, micro_batches):
    count = torch.tensor(float(count_targets(micro_batches)), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for batch in micro_batches:
        labels = batch["labels"][:, 1:]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = whole(**inputs, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits[labels != -100], labels[labels != -100], reduction="sum"
        )
        (loss / count).backward()
        total += loss.detach() / count
    return total


@pytest.fixture
def true_float64(monkeypatch):
    """Takes the float32 islands (norms, softmax) out of the library, for reference and stages."""
    to_float, softmax = torch.Tensor.float, torch.nn.functional.softmax

    def keep_double(tensor):
        return tensor if tensor.dtype == torch.float64 else to_float(tensor)

    def softmax_as_input(tensor, dim=None, dtype=None, **kwargs):
        return softmax(tensor, dim=dim, **kwargs)

    monkeypatch.setattr(torch.Tensor, "float", keep_double)
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax_as_input)


def summed_gradients(stages):
    grads = {}
    for model in stages:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grads[name] = grads.get(name, 0) + parameter.grad
    return grads


@pytest.mark.parametrize("variant", ["full", "frozen", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chain_equals_whole(family, variant, tmp_path, true_float64):
    whole = build_whole(family, variant, tmp_path)
    micro_batches = [batch_of(family, images, seed=k) for k, images in enumerate(IMAGES)]
    loss = reference_loss(whole, micro_batches)
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    for vision_stages, num_stages in SPLITS:
        stages = build_stages(
            family, variant, tmp_path, whole, vision_stages=vision_stages, num_stages=num_stages
        )
        held = [name for model in stages for name, _ in model.named_parameters()]
        assert sorted(held) == sorted(name for name, _ in whole.named_parameters())
        ours = chain(stages, micro_batches, splits_backward=num_stages == 4)
        torch.testing.assert_close(ours, loss, rtol=0, atol=1e-9)
        grads = summed_gradients(stages)
        assert set(expected) <= set(grads)
        for name, grad in grads.items():
            wanted = expected.get(name, torch.zeros_like(grad))
            torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-9, msg=name)
