"""The start weights of what a run trains, kept on the host, for passes of the start model.

What is not trained is the same in both models. While the copy is in place, the weights of the run
lie where the copy lay: a device holds one tensor more than before, never a second model.
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
    """Makes the copy; every rank of a pipeline does so together, its weights put together whole.

    Args:
        start_stage: None: the run begins, its own weights are those.
        saved: `fingerprint` of the run that is gone on with; None: it took no copy.

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
            self._take(model, start_stage)
        self.fingerprint = self._fingerprint()
        if saved is not None and self.fingerprint != saved:
            raise UserError(
                "the start model, which was read again for the divergence from it, has other "
                "weights than the one that this run began with. The same ones were expected, "
                "because a resumed run compares with the model of its first start: give "
                "`model_path` and `seed` of that run, and the same versions of torch and "
                "transformers."
            )

    def _take(self, model: Stage, start_stage: StartStage | None) -> None:
        # a stage of its own is gone behind this; gradients, which are not there yet, need as much
        start = model if start_stage is None else start_stage(model.stage)
        values = dict(start.named_parameters())
        for name in _trained([model]).keys() - self._kept.keys():
            self._kept[name] = _on_host(values[name])

    def _fingerprint(self) -> str:
        own = {bit_sum(value).item() for value in self._kept.values()}
        gathered: list[set[int | float]] = [set()] * self.runner.schedule.num_ranks
        dist.all_gather_object(gathered, own, group=self.runner.group)
        # without names: a tied weight has two in one split, and one in another
        return hashlib.sha256(str(sorted(set().union(*gathered))).encode()).hexdigest()

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
    """What is trained, by name; what two stages of a rank share is there once."""
    named = {n: p for model in models for n, p in model.named_parameters() if p.requires_grad}
    assert not any(isinstance(p, DTensor) for p in named.values()), "put together by the caller"
    return named


def _on_host(value: torch.Tensor) -> torch.Tensor:
    pins = is_accelerator(value.device)
    kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=pins)
    return kept.copy_(value.detach())
