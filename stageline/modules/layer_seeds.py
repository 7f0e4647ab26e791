"""Random numbers of a training step that follow from seed, step, micro-batch and layer alone.

Every layer of the whole model begins with a seed of its own, and so does what lies between two
layers; the blocks of a vision tower, too. So dropout masks are the same however the layers are cut
into stages, in whatever order a schedule runs them, and after a resume. Evaluation draws from
whatever generator there is.
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
_EMBEDDING = 1 << 19  # noise on the embeddings, whose turn depends on where a tower lies
_TOWER = 1 << 20  # behind all places of the decoder: those of a vision tower's blocks


def _before(layer: int) -> int:
    """The place of what lies between two layers, and before the first and behind the last."""
    return 2 * layer + 1


def _inside(layer: int) -> int:
    return 2 * layer + 2


class LayerSeeds:
    """Seeds the generators of a rank while it trains, from hooks around the layers of its stages.

    The hooks lie outside of what is compiled or recomputed: a layer that is recomputed takes the
    state that it is to replay when its forward begins, which is after the hook.

    Args:
        models: stage models; a layer of another stage needs no hook.
        seed: of the run; None leaves all generators alone.
        devices: whose generators are seeded beside those of the host.
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
        self._base: int | None = None  # of the micro-batch that runs; None: nothing is seeded
        if seed is not None:
            for model in models:
                self._put_hooks(model)

    def begin(self, step: int, *, first_micro_batch: int = 0) -> None:
        """A training step begins.

        Args:
            first_micro_batch: how many micro-batches of this step other replicas have before ours.
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
