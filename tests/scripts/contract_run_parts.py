"""Losses, optimizers, schedules and stage models that break their contract, one way each."""

import torch
from torch import nn
from torch.nn import functional

from pp_models import CausalLMStage
from register import (
    loss_fn_register,
    lr_scheduler_register,
    optimizer_register,
    sim_fn_register,
    train_model_register,
)

# -- losses --------------------------------------------------------------------------------------


def cross_entropy(logits, batch, reduction="sum"):
    return functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
        ignore_index=-100,
        reduction=reduction,
    )


@loss_fn_register("loss_of_two")
def loss_of_two(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@loss_fn_register("loss_vector")
def loss_vector(logits_BTV, micro_batch, *, num_targets):
    return cross_entropy(logits_BTV, micro_batch, "none") / num_targets


def other_loss(key, change):
    """A loss that gives something else: change(value)."""

    @loss_fn_register(key)
    def loss(logits_BTV, micro_batch, *, num_targets):
        return change(cross_entropy(logits_BTV, micro_batch) / num_targets)


other_loss("loss_float", float)
other_loss("loss_one_element", lambda value: value[None])
other_loss("loss_integer", lambda value: value.long())
other_loss("loss_dict", lambda value: {"loss": value})
other_loss("loss_three", lambda value: (value, {}, value))
other_loss("loss_figure_float", lambda value: (value, {"mine": 1.0}))


@loss_fn_register("loss_mean")
def loss_mean(logits_BTV, micro_batch, *, num_targets):
    return cross_entropy(logits_BTV, micro_batch, "mean")


@loss_fn_register("loss_half_mean")
def loss_half_mean(logits_BTV, micro_batch, *, num_targets):
    z = logits_BTV.float().logsumexp(-1).square().mean()
    return cross_entropy(logits_BTV, micro_batch) / num_targets + 0.01 * z


@loss_fn_register("loss_mean_over_count")
def loss_mean_over_count(logits_BTV, micro_batch, *, num_targets):
    return cross_entropy(logits_BTV, micro_batch, "mean") / num_targets


@loss_fn_register("loss_figure_mean")
def loss_figure_mean(logits_BTV, micro_batch, *, num_targets):
    figures = {"entropy": cross_entropy(logits_BTV, micro_batch, "mean")}
    return cross_entropy(logits_BTV, micro_batch) / num_targets, figures


@loss_fn_register("loss_declared", weighs_by_itself=True)
def loss_declared(logits_BTV, micro_batch, *, num_targets):
    return cross_entropy(logits_BTV, micro_batch, "mean")


@loss_fn_register("loss_raises")
def loss_raises(logits_BTV, micro_batch, *, num_targets):
    return micro_batch["weights"].sum() / num_targets


@loss_fn_register("loss_fails")
def loss_fails(logits_BTV, micro_batch, *, num_targets):
    return nn.functional.cross_entropy(logits_BTV, micro_batch["labels"]) / num_targets


@loss_fn_register("loss_on_a_gpu")
def loss_on_a_gpu(logits_BTV, micro_batch, *, num_targets):
    raise RuntimeError("this kernel needs CUDA")


@loss_fn_register("loss_unshifted")
def loss_unshifted(logits_BTV, micro_batch, *, num_targets):
    labels = micro_batch["labels"].flatten()
    total = functional.cross_entropy(logits_BTV.float().flatten(0, 1), labels, reduction="sum")
    return total / num_targets


@sim_fn_register("sim_scalar")
def sim_scalar(a_NV, b_NV):
    return (a_NV * b_NV).sum()


# -- optimizers ----------------------------------------------------------------------------------


@optimizer_register("optimizer_class")
def optimizer_class(param_groups, *, learning_rate, weight_decay):
    return torch.optim.AdamW


@optimizer_register("optimizer_of_one")
def optimizer_of_one(param_groups, *, learning_rate, weight_decay):
    return torch.optim.AdamW(param_groups[:1], lr=learning_rate)


@lr_scheduler_register("rate_is_a_number")
def rate_is_a_number(*, learning_rate, **others):
    return learning_rate


@lr_scheduler_register("rate_is_an_object")
def rate_is_an_object(*, learning_rate, min_lr, warmup_steps, warmup_start_lr, total_steps):
    weight = nn.Parameter(torch.zeros(1))
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([weight], lr=1.0), lambda step: 1.0)


# -- stage models --------------------------------------------------------------------------------


class SaysItself(CausalLMStage):
    def get_batch_input(self, batch):
        return self.get_example_input(*batch["input_ids"].shape)


class WrongShape(SaysItself):
    def get_example_input(self, micro_batch_size, max_token_num):
        (one,) = super().get_example_input(micro_batch_size, max_token_num)
        return (one if self.is_first else one[..., : one.shape[-1] // 2],)


class ExampleIsATensor(CausalLMStage):
    def get_example_input(self, micro_batch_size, max_token_num):
        (one,) = super().get_example_input(micro_batch_size, max_token_num)
        return one


class ExampleIsNone(CausalLMStage):
    def get_example_input(self, micro_batch_size, max_token_num):
        super().get_example_input(micro_batch_size, max_token_num)


class LostBuffer(CausalLMStage):
    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        with torch.device("meta"):
            self.register_buffer("table", torch.arange(4), persistent=False)


class TakesOne(CausalLMStage):
    def forward(self, hidden_or_ids):
        return super().forward(hidden_or_ids)


for _name, _class in {
    "stage_wrong_shape": WrongShape,
    "stage_example_tensor": ExampleIsATensor,
    "stage_example_none": ExampleIsNone,
    "stage_lost_buffer": LostBuffer,
    "stage_takes_one": TakesOne,
}.items():
    train_model_register[_name] = _class.build


class Plain(nn.Module):
    def __init__(self, stage, num_stages):
        super().__init__()
        self.stage, self.num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.embed = nn.Embedding(300, 16)
        self.head = nn.Linear(16, 300)

    def forward(self, hidden, **batch):
        return self.embed(hidden) if self.is_first else self.head(hidden)


@train_model_register("stage_plain")
def stage_plain(*, stage, num_stages, **kwargs):
    return Plain(stage, num_stages), None, 0


@train_model_register("stage_alone")
def stage_alone(*, stage, num_stages, **kwargs):
    return CausalLMStage.build(stage=stage, num_stages=num_stages, **kwargs)[0]
