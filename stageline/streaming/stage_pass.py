"""A stage on a lane for one pass over the micro-batches: its weights come, compute and go.

Nothing waits here: each piece of work is put into a queue behind the marks that it needs.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from stageline.streaming.host_memory import allocate
from stageline.streaming.host_weights import Home, HostWeights, offsets, shell_of, view_at
from stageline.streaming.lanes import DONE, Buffer, DeviceBudgetError, Lane, Mark


class StagePass:
    """Weights of a stage on its lane.

    Args:
        shelves: of its layers.
        makes_gradients: a backward stage.
        is_recomputed: its layers ran before in this pass: buffers start from `snapshots`.
        snapshots: buffers as they were when the layers first ran in this pass, by their id.
    """

    def __init__(
        self,
        lane: Lane,
        shelves: Sequence[HostWeights],
        *,
        makes_gradients: bool,
        is_recomputed: bool,
        snapshots: dict[int, torch.Tensor],
    ) -> None:
        self.lane = lane
        self.shelves = shelves
        self.makes_gradients = makes_gradients
        self.is_recomputed = is_recomputed
        self.shells: list[Any] = []
        self._snapshots = snapshots
        self._homes = {id(home.parameter): home for shelf in shelves for home in shelf.homes}
        self._buffers = {id(each): each for shelf in shelves for each in shelf.buffers}
        self._on_device: dict[int, torch.Tensor] = {}
        self._weights: Buffer | None = None
        self._gradients: Buffer | None = None
        self.used: set[int] = set()  # ids of parameters that got a gradient, as work is done
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # (view, host) to upload
        self._num_bytes = 0
        self._uploaded: Mark = DONE

    def upload(self, share: float) -> None:
        """Puts a share of the weights, counted from the first, on their way.

        While another stage runs; without room for both it is left for `open`.
        """
        if self._weights is None:
            try:
                self._begin_upload()
            except DeviceBudgetError:
                return
        left = self._num_bytes * (1.0 - share)
        queue = self.lane.inward
        while self._waiting and _bytes_of(self._waiting) > left:
            view, host = self._waiting.pop(0)
            queue.run(functools.partial(view.copy_, host, non_blocking=True))
        self._uploaded = queue.record()

    def open(self) -> None:
        """Makes the stage ready to compute; what is missing comes now."""
        if self._weights is None:
            self._begin_upload()
        self.upload(1.0)
        self.lane.compute.after(self._uploaded)
        if self.makes_gradients:
            self._make_gradients()
        self.shells = [shell_of(shelf.layer, self._on_device) for shelf in self.shelves]

    def close(self) -> Mark:
        """Sends gradients and buffers home and gives the memory back.

        Returns:
            The mark behind which they are there.
        """
        computed = self.lane.compute.record()
        outward = self.lane.outward
        outward.after(computed)
        for shelf, home in self.sent:
            shelf.wait_until_collected()
            leaf = self._on_device[id(home.parameter)]
            outward.run(functools.partial(_stage_gradient, self.used, shelf, home, leaf))
        if not self.is_recomputed and self._buffers:
            outward.run(functools.partial(_buffers_home, self.shelves, self.shells))
        gone = outward.record()
        assert self._weights is not None
        self.lane.pool.give(self._weights, gone if self._buffers else computed)
        if self._gradients is not None:
            self.lane.pool.give(self._gradients, gone)
        self._let_go()
        return gone

    def abandon(self) -> None:
        """Gives the memory back after an error; what was computed is lost."""
        held = [each for each in (self._weights, self._gradients) if each is not None]
        if held:
            mark = self.lane.all_done()  # what was on its way in must not land in the next user
            for buffer in held:
                self.lane.pool.give(buffer, mark)
        self._let_go()

    def _let_go(self) -> None:
        """Keeps no view of the buffers: the pool must be able to free them."""
        self._weights = self._gradients = None
        self._on_device, self._waiting, self.shells = {}, [], []

    @property
    def trained(self) -> list[Home]:
        """Homes of the parameters whose gradients this stage makes."""
        return [home for home in self._homes.values() if home.parameter.requires_grad]

    @property
    def sent(self) -> list[tuple[HostWeights, Home]]:
        """Which gradients go to which shelf: that of a parameter of several layers goes once."""
        if not self.makes_gradients:
            return []
        first = {
            id(home): (shelf, home)
            for shelf in reversed(self.shelves)
            for home in shelf.homes
            if home.parameter.requires_grad
        }
        return list(first.values())

    def _begin_upload(self) -> None:
        parameters = [home.parameter.detach() for home in self._homes.values()]
        buffers = [self._snapshots.get(key, each) for key, each in self._buffers.items()]
        if not self.is_recomputed:
            # what the device changes is copied, and where it is recomputed it starts from here
            self._snapshots |= {key: self._kept(each) for key, each in self._buffers.items()}
        hosts = parameters + buffers
        starts, self._num_bytes = offsets(hosts)
        self._weights = self.lane.pool.take(max(self._num_bytes, 1), self.lane.inward)
        # .data: a buffer that a layer changes must not count as a change of its neighbours, whose
        # values a graph has saved
        views = [
            view_at(self._weights.data, start, host).data
            for start, host in zip(starts, hosts, strict=True)
        ]
        self._waiting = list(zip(views, hosts, strict=True))
        keys = [*self._homes, *self._buffers]
        self._on_device = dict(zip(keys, views, strict=True))

    def _kept(self, buffer: torch.Tensor) -> torch.Tensor:
        """A copy on the host; pinned for a GPU, since this thread would wait for another one."""
        is_pinned = self.lane.device.type == "cuda"
        return torch.empty_like(buffer, pin_memory=is_pinned).copy_(buffer)

    def _make_gradients(self) -> None:
        """Leaves that add their gradients up in one zeroed run of bytes."""
        trained = self.trained
        starts, num_bytes = offsets([home.parameter for home in trained])
        self._gradients = self.lane.pool.take(max(num_bytes, 1), self.lane.compute)
        page = self._gradients.data
        self.lane.compute.run(page.zero_)
        for home, start in zip(trained, starts, strict=True):
            leaf = self._on_device[id(home.parameter)].detach().requires_grad_(True)
            leaf.grad = view_at(page, start, home.parameter)
            leaf.register_post_accumulate_grad_hook(
                functools.partial(_note_use, self.used, id(home.parameter))
            )
            self._on_device[id(home.parameter)] = leaf


def _stage_gradient(used: set[int], shelf: HostWeights, home: Home, leaf: torch.Tensor) -> None:
    # not used, it has none, as in PyTorch, and not zeros to decay by
    if id(home.parameter) in used and leaf.grad is not None:
        shelf.staged_for(home, allocate).copy_(leaf.grad, non_blocking=True)


def _note_use(used: set[int], key: int, leaf: torch.Tensor) -> None:
    used.add(key)


def _buffers_home(shelves: Sequence[HostWeights], shells: Sequence[Any]) -> None:
    for shelf, shell in zip(shelves, shells, strict=True):
        # of the shell's own: a layer may put a new tensor in the place of a buffer
        for host, device in zip(shelf.buffers, shell.buffers(), strict=True):
            host.copy_(device, non_blocking=True)


def _bytes_of(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(host.numel() * host.element_size() for _, host in pairs)
