"""What the trainer's optimizer sees of a model that streams; the counterpart of MasterWeights.

The optimizer's parameters and the sums of gradients lie on the host, in float32. A step runs in
the engine's thread: in turn, or beside the passes of the next step, one step stale.
"""

from collections.abc import Callable, Mapping

from torch import nn

from stageline.streaming.engine import RoundPipe
from stageline.streaming.shelf import Home, all_homes


class StageWeights:
    """The trained parameters of all stages, by name.

    Args:
        named_parameters: the trainable parameters of the stages.
        stale: a step runs beside the passes of the next one, which so have the weights before it.

    Attributes:
        parameters: what the optimizer updates; their `.grad` is there from `take` on.
        shares: of parameters that replicas share out: none.
    """

    def __init__(
        self, pipe: RoundPipe, named_parameters: Mapping[str, nn.Parameter], *, stale: bool
    ) -> None:
        self.model_parameters = dict(named_parameters)
        self.shares: set[str] = set()
        self._pipe = pipe
        self._stale = stale
        self._is_given = False  # the sums belong to a step that may still run
        masters = dict(pipe.optim_named_parameters())
        homes = {id(home.parameter): home for home in all_homes(pipe._shelves)}
        self._homes: list[tuple[Home, nn.Parameter]] = [
            (home, home.master) for home in homes.values() if home.master is not None
        ]
        assert len(masters) == len(self._homes), "each trained parameter once"
        self.parameters: dict[str, nn.Parameter] = {
            name: homes[id(parameter)].master for name, parameter in named_parameters.items()
        }

    def take(self) -> None:
        """Shows the sums of gradients, once the step before and all passes are over."""
        self._pipe._worker.wait()
        for home, master in self._homes:
            master.grad = home.total
        self._is_given = False

    def zero_grad(self) -> None:
        """Forgets all gradients; those of a step that may still run are its own."""
        if self._is_given:
            return
        self._pipe._worker.wait()
        for home, master in self._homes:
            home.total = master.grad = None

    def update(self, step: Callable[[], object]) -> None:
        """Runs an optimizer step on the gradients that are there.

        Raises:
            Exception: what this step raised, or of a stale one the step before.
        """
        for home, master in self._homes:
            home.total = master.grad  # clipped, or those of another run

        def run() -> None:
            step()
            for _, master in self._homes:
                master.grad = None

        self._is_given = True
        self._pipe.step(run, is_async=self._stale)

    def write_back(self) -> None:
        """Rounds the optimizer's values into the model."""
        self._pipe.step(lambda: None, is_async=False)

    def take_shares(self) -> None:
        """There are none."""

    def settle(self) -> None:
        """Returns when all steps are done, and the model has their values."""
        self._pipe.synchronize()
