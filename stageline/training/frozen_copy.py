"""The start weights of what a run trains, kept on the host, for passes of the start model.

While the copy is in place, the weights of the run are where the copy was: a device holds one tensor
more than before, never a second model.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stageline.device import is_accelerator
from stageline.errors import UserError
from stageline.pipeline.runner import PipelineRunner
from stageline.stage import Stage
from stageline.training.replicas import bit_sum

StartStage = Callable[[int], Stage]  # index of a stage -> the stage as the run began with it


class FrozenCopy:
    """The copy; all ranks of a pipeline make it together, with whole (not sharded) weights.

    Args:
        start_stage: builds a stage of the start model; None: the run begins with its own weights.
        saved: `fingerprint` of a resumed run; None: it took no copy.

    Attributes:
        fingerprint: of the start weights, the same on all ranks and in every split.

    Raises:
        UserError: the start model is another one than that of the run.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        *,
        start_stage: StartStage | None = None,
        saved: str | None = None,
    ) -> None:
        self.runner = runner
        self._kept: dict[str, torch.Tensor] = {}
        for model in runner.local:
            start = model if start_stage is None else start_stage(model.stage)
            values = dict(start.named_parameters())
            for name in _trained([model]).keys() - self._kept.keys():
                value = values[name].detach()
                pins = is_accelerator(value.device)
                kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=pins)
                self._kept[name] = kept.copy_(value)
            del start, values  # a second stage is gone before the next one is built
        own = {bit_sum(value).item() for value in self._kept.values()}
        gathered: list[set[int | float]] = [set()] * runner.schedule.num_ranks
        dist.all_gather_object(gathered, own, group=runner.group)
        # without names: a tied weight has two in one split, and one in another
        sums = sorted(set().union(*gathered))
        self.fingerprint = hashlib.sha256(str(sums).encode()).hexdigest()
        if saved is not None and self.fingerprint != saved:
            raise UserError(
                "the start model was read again, and has other weights than the one that this run "
                "began with. Give `model_path` and `seed` of that run, and the same versions of "
                "torch and transformers."
            )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, passes without gradients are those of the start model, to the bit."""
        done: list[str] = []
        trained = _trained(self.runner.local)
        try:
            for name, parameter in trained.items():
                self._exchange(name, parameter)
                done.append(name)
            yield
        finally:
            for name in done:
                self._exchange(name, trained[name])

    @torch.no_grad()
    def _exchange(self, name: str, parameter: nn.Parameter) -> None:
        kept = self._kept[name]
        if kept.device == parameter.device:
            parameter.data, self._kept[name] = kept, parameter.data
            return
        now = parameter.detach().clone()
        parameter.copy_(kept)
        kept.copy_(now)


def _trained(models: Iterable[Stage]) -> Mapping[str, nn.Parameter]:
    """Return what is trained, by name; what two stages of a rank share is there once."""
    named = {n: p for model in models for n, p in model.named_parameters() if p.requires_grad}
    assert not any(isinstance(p, DTensor) for p in named.values()), "put together by the caller"
    return named
