"""A learning rate for each part against torch's own AdamW with groups; state and resume."""

import copy

import pytest
import torch

from optimizer import adamw, cosine
from pp_models import VisionLanguageStage
from stageline.checkpoint.init import init_split_model
from stageline.training.optimizers import optimizer_groups, set_learning_rate
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

RATES = {"vit": 0.002, "mlp": 0.03, "llm": 0.01, "lm_head": 0.0}
BASE = 0.01
PREFIXES = {  # written by hand: what the parts of InternVL are called
    "model.vision_tower": "vit",
    "model.multi_modal_projector": "mlp",
    "model.language_model": "llm",
    "lm_head": "lm_head",
}


def built(**options):
    model = VisionLanguageStage(tiny_config("internvl"), stage=0, num_stages=1, **options)
    init_split_model(model, seed=2, device="cpu", dtype=torch.float32)
    model.frozen()
    return model


def loss_of(model):
    batch = tiny_micro_batches("internvl")[0]
    labels = batch.pop("labels")
    logits = model(batch["input_ids"], **batch)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("options", [{"vit_lora_num": 1, "llm_lora_num": 1}], ids=str)
def test_rates_are_those_of_torch_with_a_group_for_each_part(options):
    ours, theirs = built(**options), built(**options)
    schedule = {"warmup_steps": 2, "total_steps": 6, "warmup_start_lr": 0.002, "min_lr": 0.001}
    rate = cosine(learning_rate=BASE, **schedule)
    groups = optimizer_groups(
        trained(ours), weight_decay=0.1, lr_scale_of=lambda name: RATES[ours.part_of(name)] / BASE
    )
    optimizer = adamw(groups, learning_rate=BASE, weight_decay=0.1)
    by_part, own = {}, []
    for name, parameter in trained(theirs).items():
        part = next(part for prefix, part in PREFIXES.items() if name.startswith(prefix))
        by_part.setdefault((part, parameter.ndim >= 2), []).append(parameter)
    for (part, decays), parameters in by_part.items():
        shape = {
            name: value * RATES[part] / BASE for name, value in schedule.items() if "lr" in name
        }
        steps = {name: value for name, value in schedule.items() if "lr" not in name}
        part_rate = cosine(learning_rate=RATES[part], **shape, **steps)
        decay = 0.1 if decays else 0.0
        own.append((torch.optim.AdamW(parameters, weight_decay=decay), part_rate))
    start = copy.deepcopy(dict(ours.named_parameters()))
    for step in range(6):
        for model in (ours, theirs):
            model.zero_grad()
            loss_of(model).backward()
        set_learning_rate(optimizer.param_groups, rate(step))
        optimizer.step()
        for one, part_rate in own:
            one.param_groups[0]["lr"] = part_rate(step)
            one.step()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)
        is_moved = not torch.equal(parameter, start[name])
        is_still = not parameter.requires_grad or name.startswith("lm_head")  # its rate is 0
        assert is_moved or is_still, name
    assert torch.equal(ours.get_parameter("lm_head.weight"), start["lm_head.weight"])
