"""Batches of a mixture as optimizer steps: whose rows are whose. Serves the micro-batch loader.

The state of a run is two integers, the epoch and the batch that come next. Steps run on over the
end of an epoch, so the sequence of batches is the same for any number of batches a step.
"""

from collections.abc import Iterator

from stageline.corpus.mixture import Mixture
from stageline.errors import UserError


class CorpusSampler:
    """The rows of each step; the replicas of a batch have every `dp_degree`-th row each.

    An optimizer step is `accumulate_steps` batches, and an epoch of the sampler as many whole steps
    as the mixture's epoch has. The batches that are left over are not left out: the next epoch
    begins with them.

    Args:
        batch_size: rows of a replica in a batch.
        start: epoch and batch of the mixture at which step `start_step` begins. A run that goes on
            with another number of replicas or batches a step gives here what `state_after` said.
        start_step: a number of steps, counted over all epochs.

    Raises:
        UserError: the batches of the mixture are of another size, or too few for one step.
    """

    group_size = 1
    eval = False

    def __init__(
        self,
        mixture: Mixture,
        *,
        batch_size: int,
        accumulate_steps: int = 1,
        dp_rank: int = 0,
        dp_degree: int = 1,
        start: tuple[int, int] = (0, 0),
        start_step: int = 0,
    ) -> None:
        assert 0 <= dp_rank < dp_degree
        if batch_size * dp_degree != mixture.batch_rows:
            raise UserError(
                f"{dp_degree} data parallel replicas of {batch_size} rows make a global batch of "
                f"{batch_size * dp_degree}, and the mixture has batches of {mixture.batch_rows}. "
                "The same was expected, because batches are what a run goes on with: set "
                "--batch-size to the quotient."
            )
        self.mixture = mixture
        self.batch_size = batch_size
        self.accumulate_steps = accumulate_steps
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.epoch = 0
        self._origin = start[0] * len(mixture) + start[1] - start_step * accumulate_steps
        if len(self) == 0:
            raise UserError(
                f"an epoch of the corpus has {len(mixture)} batches, one optimizer step takes "
                f"{accumulate_steps} (--accumulate-steps). At least one step was expected: lower "
                "--accumulate-steps or --batch-size, or choose a drop mode that repeats rows."
            )

    @property
    def num_samples(self) -> int:
        """Rows of all types."""
        return self.mixture.starts[-1]

    @property
    def step_samples(self) -> int:
        """Rows of one step of one replica."""
        return self.batch_size * self.accumulate_steps

    @property
    def seed(self) -> int:
        """Of all orders."""
        return self.mixture.seed

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has another order."""
        return self.mixture.shuffle

    def __len__(self) -> int:
        """Steps of one epoch."""
        return len(self.mixture) // self.accumulate_steps

    def set_epoch(self, epoch: int) -> None:
        """The epoch that iterating goes through."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """The steps of one epoch."""
        return (shares[self.dp_rank] for shares in self.epoch_shares())

    def steps(self, start_step: int = 0) -> Iterator[list[int]]:
        """All steps from `start_step` on, epoch after epoch, without end."""
        return (shares[self.dp_rank] for shares in self.shares(start_step))

    def epoch_shares(self) -> Iterator[list[list[int]]]:
        """The steps of one epoch, with the rows of every replica."""
        first = self.epoch * len(self)
        return (self.step_shares(step) for step in range(first, first + len(self)))

    def shares(self, start_step: int = 0) -> Iterator[list[list[int]]]:
        """As `steps`, with the rows of every replica."""
        step = start_step
        while True:
            yield self.step_shares(step)
            step += 1

    def step_shares(self, step: int) -> list[list[int]]:
        """Each replica's rows of one step, batch after batch."""
        shares: list[list[int]] = [[] for _ in range(self.dp_degree)]
        for batch in range(self.accumulate_steps):
            rows = self.mixture.batch(*self._position(step, batch))
            for replica, share in enumerate(shares):
                share.extend(rows[replica :: self.dp_degree].tolist())
        return shares

    def state_after(self, step: int) -> tuple[int, int]:
        """Epoch and batch of the mixture that come next when `step` steps are done."""
        return self._position(step, 0)

    def _position(self, step: int, batch: int) -> tuple[int, int]:
        number = self._origin + step * self.accumulate_steps + batch
        return divmod(number, len(self.mixture))
