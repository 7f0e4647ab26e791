"""Optimizer and lr_scheduler components."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from register import lr_scheduler_register, optimizer_register
from stageline.device import FUSED, accelerators
from stageline.errors import UserError, package


@optimizer_register("adamw")
def adamw(
    param_groups: list[dict],
    *,
    learning_rate: float,
    weight_decay: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    amsgrad: bool = False,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101); groups may set their own decay.

    Args:
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the second moment.
        amsgrad: divides by the largest second moment so far (arXiv 1904.09237), a third state.
        fused: one kernel for the whole step; by default where all parameters are on a GPU.
    """
    # and where all are on the host below one (--engine streaming); on a CPU it rounds differently,
    # so that a run without a GPU keeps its bits
    if fused is None:
        kinds = {weight.device.type for group in param_groups for weight in group["params"]}
        fused = len(kinds) == 1 and kinds <= FUSED and (kinds != {"cpu"} or bool(accelerators()))
    return torch.optim.AdamW(
        param_groups,
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
        fused=fused or None,  # None: torch still takes its loop-free kernels there
    )


@optimizer_register("sgd")
def sgd(
    param_groups: list[dict], *, learning_rate: float, weight_decay: float, momentum: float = 0.0
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum.

    Args:
        momentum: decay of the velocity.
    """
    return torch.optim.SGD(
        param_groups, lr=learning_rate, momentum=momentum, weight_decay=weight_decay
    )


@optimizer_register("adamw_8bit", needs_whole=True)
def adamw_8bit(
    param_groups: list[dict],
    *,
    learning_rate: float,
    weight_decay: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    paged: bool = False,
) -> torch.optim.Optimizer:
    """AdamW with both moments in 8 bits, a scale a block (Dettmers et al. 2022, arXiv 2110.02861).

    Small parameters (under 4,096 elements) keep float32 moments. Of bitsandbytes.

    Args:
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the second moment.
        paged: moments may move to host memory where the GPU's is full.
    """
    user, other = "--optimizer adamw_8bit", "use --optimizer adamw or adafactor"
    bitsandbytes = package("bitsandbytes", user, extra="quantization", instead=other)
    return bitsandbytes.optim.AdamW8bit(
        param_groups,
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        is_paged=paged,
    )


@optimizer_register("adafactor", needs_whole=True)
def adafactor(
    param_groups: list[dict],
    *,
    learning_rate: float,
    weight_decay: float,
    beta2_decay: float = -0.8,
    eps: float = 1e-3,
    clip: float = 1.0,
) -> torch.optim.Optimizer:
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): a row and a column for a matrix.

    The rate is relative: it is multiplied by the root mean square of a parameter, and no higher
    than 1 / sqrt(step). No first moment.

    Args:
        beta2_decay: the second moment's decay is 1 - step ** beta2_decay.
        eps: the least root mean square of a parameter.
        clip: an update's root mean square is brought down to this.
    """
    return torch.optim.Adafactor(
        param_groups,
        lr=learning_rate,
        beta2_decay=beta2_decay,
        eps=(None, eps),
        d=clip,
        weight_decay=weight_decay,
    )


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that share `state` and `param_groups`, so that one sees all of them.

    Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) makes the momentum of a matrix
    orthogonal before it is added. That is meant for matrices between hidden states: embeddings,
    heads, norms and biases get AdamW.

    Args:
        param_groups: with `params` and `param_names`.
        adamw_names: a parameter whose name has one of these texts in it gets AdamW.
        muon, adamw: options of the two.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        *,
        adamw_names: Sequence[str],
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        split: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # inner matrices, others
        for group in param_groups:
            own: dict[bool, dict[str, torch.nn.Parameter]] = {True: {}, False: {}}
            for name, weight in zip(group["param_names"], group["params"], strict=True):
                is_inner = weight.ndim == 2 and not any(text in name for text in adamw_names)
                own[is_inner][name] = weight
            for is_inner, some in own.items():
                if some:
                    some_group = {**group, "params": [*some.values()], "param_names": [*some]}
                    split[is_inner].append(some_group)
        kinds = ((torch.optim.Muon, muon, split[True]), (torch.optim.AdamW, adamw, split[False]))
        self.optimizers: list[torch.optim.Optimizer]
        self.optimizers = [kind(groups, **options) for kind, options, groups in kinds if groups]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        super().__init__(groups, defaults={})
        for optimizer in self.optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    # torch's optimizers take a closure, which no step here has
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for optimizer in self.optimizers:
            optimizer.step()


@optimizer_register("muon", needs_whole=True)
def muon(
    param_groups: list[dict],
    *,
    learning_rate: float,
    weight_decay: float,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    adamw_names: list[str] | None = None,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Muon for matrices inside the model (arXiv 2502.16982); AdamW for all else.

    Args:
        momentum: decay of the momentum.
        nesterov: looks one step ahead.
        ns_steps: steps of the Newton-Schulz iteration.
        adjust: match_rms_adamw scales updates to the size of AdamW's, so that its rates fit.
        adamw_names: parameters with one of these texts in their name get AdamW; default: embed,
            wte, wpe, head, score.
        beta1, beta2, eps: of AdamW.
    """
    shared = {"lr": learning_rate, "weight_decay": weight_decay}
    own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust}
    default = ["embed", "wte", "wpe", "head", "score"]
    return MuonWithAdamW(
        param_groups,
        adamw_names=default if adamw_names is None else adamw_names,
        muon={**shared, **own},
        adamw={**shared, "betas": (beta1, beta2), "eps": eps},
    )


Rate = Callable[[int], float]  # step -> learning rate


@lr_scheduler_register("cosine")
def cosine(*, learning_rate: float, min_lr: float, total_steps: int, **warmup: Any) -> Rate:
    """Linear warm-up, then half a cosine down to `min_lr` at `total_steps`."""

    def rate(progress: float) -> float:
        return min_lr + (learning_rate - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return _after_warmup(rate, learning_rate, total_steps, None, **warmup)


@lr_scheduler_register("constant")
def constant(*, learning_rate: float, min_lr: float, total_steps: int, **warmup: Any) -> Rate:
    """Linear warm-up, then `learning_rate` to the end."""
    return _after_warmup(lambda progress: learning_rate, learning_rate, total_steps, None, **warmup)


@lr_scheduler_register("linear")
def linear(*, learning_rate: float, min_lr: float, total_steps: int, **warmup: Any) -> Rate:
    """Linear warm-up, then a straight line down to `min_lr` at `total_steps`."""

    def rate(progress: float) -> float:
        return learning_rate + (min_lr - learning_rate) * progress

    return _after_warmup(rate, learning_rate, total_steps, None, **warmup)


@lr_scheduler_register("wsd")
def wsd(
    *,
    learning_rate: float,
    min_lr: float,
    warmup_steps: int,
    warmup_start_lr: float,
    total_steps: int,
    decay: float = 0.2,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Rate:
    """Warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395), down to `min_lr`.

    Args:
        decay: the last steps, in which the rate falls: below 1 a share of all, else their number.
        shape: of the fall; sqrt is 1 - sqrt(progress).
    """
    falling = round(decay * total_steps) if decay < 1 else round(decay)
    if decay < 0 or falling > total_steps - warmup_steps:
        raise UserError(
            f"--lr-scheduler.decay {decay:g} makes {falling} steps of decay, after {warmup_steps} "
            f"of warm-up, which do not fit into {total_steps} steps. Lower one of them, or raise "
            "--total-steps."
        )
    left = {
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
        "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    }[shape]

    def rate(progress: float) -> float:
        return min_lr + (learning_rate - min_lr) * left(progress) if progress else learning_rate

    start: dict[str, Any] = {"warmup_steps": warmup_steps, "warmup_start_lr": warmup_start_lr}
    return _after_warmup(rate, learning_rate, total_steps, falling, **start)


def _after_warmup(
    rate: Callable[[float], float],
    learning_rate: float,
    total_steps: int,
    falling: int | None,
    *,
    warmup_steps: int,
    warmup_start_lr: float,
) -> Rate:
    """Return a schedule with a linear warm-up, then the rate by the progress, 0 to 1, of the fall.

    Args:
        falling: last steps in which the rate falls; None: all after the warm-up.
    """
    first = warmup_steps if falling is None else total_steps - falling

    def with_warmup(step: int) -> float:
        if step < warmup_steps:
            return warmup_start_lr + (learning_rate - warmup_start_lr) * step / warmup_steps
        return rate(max(0.0, min(1.0, (step - first) / max(1, total_steps - first))))

    return with_warmup
