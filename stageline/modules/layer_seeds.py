"""Random numbers of a training step that follow only from seed, step, micro-batch and layer.

Every layer of the whole model begins with a seed of its own, and so do the modules between two
layers and the blocks of a vision tower. So dropout masks are the same for every split into stages,
for every order in which a schedule runs them, and after a resume. Evaluation draws from the
generator as it is.
"""

import functools
from collections.abc import Iterable

import torch

from stageline.device import generators_of
from stageline.errors import UserError
from stageline.modules.new_rows import noisy_modules
from stageline.seeds import derive_seed, mix_seed, seed_host
from stageline.stage import Stage

_LOSS = 0
_EMBEDDING = 1 << 19  # noise on the embeddings, whose turn depends on where a tower is
_TOWER = 1 << 20  # blocks of a vision tower get places behind all those of the decoder


def _before(layer: int) -> int:
    """Return the place of the modules before a layer, or behind the last one."""
    return 2 * layer + 1


def _inside(layer: int) -> int:
    return 2 * layer + 2


class LayerSeeds:
    """Seeds of the generators of a rank in training, set by hooks around the layers of its stages.

    The hooks stay outside of all that is compiled or recomputed: a layer that is recomputed takes
    the state that it will replay when its forward begins, which is after the hook.

    Args:
        models: stage models; a layer of another stage needs no hook.
        seed: of the run; None: no generator is seeded.
        devices: their generators are seeded in addition to that of the host.
    """

    def __init__(
        self,
        models: Iterable[Stage] = (),
        *,
        seed: int | None = None,
        devices: Iterable[torch.device] = (),
    ) -> None:
        self.seed = seed
        self._generators = generators_of(devices) if seed is not None else []
        self._step: int | None = None
        self._first_micro_batch = 0
        self._base: int | None = None  # seed of the micro-batch that runs; None: nothing is seeded
        if seed is not None:
            for model in models:
                self._put_hooks(model)

    def begin(self, step: int, *, first_micro_batch: int = 0) -> None:
        """Begin a training step.

        Args:
            first_micro_batch: number of micro-batches of this step on the replicas before this one.
        """
        self._step = step if self.seed is not None else None
        self._first_micro_batch = first_micro_batch

    def end(self) -> None:
        """All passes of the step are over; an optimizer that draws draws the same on all ranks.

        On all replicas, which must stay equal, too.
        """
        if self._step is not None and self.seed is not None:
            self._seed_all(derive_seed(self.seed, "update", self._step))
        self._step = self._base = None

    def start(self, model: Stage, micro_batch: int) -> None:
        """A forward pass of a stage begins: what it draws before its first layer is settled."""
        if self._step is None or self.seed is None or not model.training:
            self._base = None
            return
        index = self._first_micro_batch + micro_batch
        self._base = derive_seed(self.seed, "micro-batch", self._step, index)
        tower = getattr(model, "tower_layers", range(0))
        is_inside = tower.start > 0  # stage 0 begins as it does with the whole tower
        place = _TOWER + _before(tower.start) if is_inside else _before(model.layers.start)
        self._seed_all(mix_seed(self._base, place))

    def start_loss(self) -> None:
        """The loss of the micro-batch begins."""
        if self._base is not None:
            self._seed_all(mix_seed(self._base, _LOSS))

    def _put_hooks(self, model: Stage) -> None:
        try:
            layers = model.layer_list()
        except UserError:  # a model of the user's own: only the start of each stage is settled
            layers = []
        own = [(0, index, layer) for index, layer in layers if index in model.layers]
        tower_list = getattr(model, "tower_list", list)
        own += [(_TOWER, index, block) for index, block in tower_list()]
        for embedding in noisy_modules(model):
            embedding.register_forward_pre_hook(functools.partial(self._hook, _EMBEDDING))
            after = functools.partial(self._hook, _before(0))
            embedding.register_forward_hook(after)
        for base, index, layer in own:
            layer.register_forward_pre_hook(functools.partial(self._hook, base + _inside(index)))
            layer.register_forward_hook(functools.partial(self._hook, base + _before(index + 1)))

    def _hook(self, place: int, *_: object) -> None:
        if self._base is not None:
            seed = mix_seed(self._base, place)
            for generator in self._generators:
                generator.manual_seed(seed)

    def _seed_all(self, seed: int) -> None:
        seed_host(seed)
        for generator in self._generators[1:]:
            generator.manual_seed(seed)


NO_SEEDS = LayerSeeds()
