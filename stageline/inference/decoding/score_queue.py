"""Rows whose last tokens are scored: what waits, what is on its way, who is told."""

import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from stageline.inference.decoding import prompts
from stageline.inference.decoding.order import Order
from stageline.inference.decoding.request import (
    Cancelled,
    EngineError,
    Failed,
    Listener,
    Scored,
    ScoreRequest,
)

_Row = tuple[ScoreRequest, Listener]


class ScoreQueue:
    """Rows are scored in their order, so many together as a pass may have tokens.

    Args:
        max_tokens: of one pass, with padding; a longer row goes alone.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.waiting: deque[_Row] = deque()
        self.done: deque[Scored | Failed] = deque()
        self._on_their_way: deque[list[_Row]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether something waits or is on its way."""
        return bool(self.waiting or self._on_their_way)

    @property
    def is_on_its_way(self) -> bool:
        """Whether the stages have a pass that has not come back."""
        return bool(self._on_their_way)

    def answers(
        self, items: Iterable[ScoreRequest], *, most: int, act: Callable[[], object]
    ) -> Iterator[Scored | Failed]:
        """Scores of all items, as they are done.

        Args:
            most: so many wait at a time.
            act: brings the engine on.
        """
        source, is_over = iter(items), False
        while not is_over or self.has_work or self.done:
            while not is_over and len(self.waiting) < most:
                item = next(source, None)
                is_over = item is None
                if item is not None:
                    self.add(item, self.done.append)
            while self.done:
                yield self.done.popleft()
            if self.has_work:
                act()

    def forget(self, act: Callable[[], object]) -> None:
        """Drops what nobody wants any more, when it has come back."""
        self.waiting.clear()
        while self.has_work:
            act()
        self.done.clear()

    def add(self, item: ScoreRequest, listener: Listener) -> None:
        """A row that is to be scored."""
        self.waiting.append((item, listener))

    def cancel(self, key: str) -> None:
        """Drops a row that waits still; one on its way is told when it is back."""
        left = [row for row in self.waiting if row[0].key == key]
        self.waiting = deque(row for row in self.waiting if row[0].key != key)
        for _, listener in left:
            _tell(listener, Failed(key, Cancelled("the score was cancelled")))

    def fail_all(self, error: Exception) -> None:
        """Tells everybody that there is no score."""
        rows = [row for rows in [*self._on_their_way, self.waiting] for row in rows]
        self._on_their_way.clear()
        self.waiting.clear()
        for item, listener in rows:
            _tell(listener, Failed(item.key, error))

    def next_order(self) -> tuple[Order, dict[str, torch.Tensor]]:
        """The next pass and what it reads."""
        rows: list[_Row] = []
        while self.waiting and self._goes_with(rows, self.waiting[0][0]):
            rows.append(self.waiting.popleft())
        self._on_their_way.append(rows)
        items = [item for item, _ in rows]
        order = Order(
            "score",
            rows=list(range(len(items))),
            lengths=[prompts.length_of(item.prompt) - 1 for item in items],
            targets=[item.prompt["input_ids"][0, -item.num_targets :].tolist() for item in items],
            num_tops=[item.num_top for item in items],
        )
        # nothing follows the last token: a row may be one longer than the model has positions
        return order, prompts.together([prompts.without_last(item.prompt) for item in items])

    def _goes_with(self, rows: list[_Row], new: ScoreRequest) -> bool:
        if not rows:
            return True
        if prompts.is_alone(rows[0][0].prompt) or prompts.is_alone(new.prompt):
            return False
        width = max(prompts.length_of(item.prompt) for item in [*(row[0] for row in rows), new])
        return width * (len(rows) + 1) <= self.max_tokens

    def take(self, order: Order) -> None:
        """The oldest pass is back."""
        for place, (item, listener) in enumerate(self._on_their_way.popleft()):
            if order.error is not None:
                _tell(listener, Failed(item.key, EngineError(order.error)))
                continue
            values, is_greedy, tops = order.scores[place]
            likeliest = tuple(tuple((int(i), value) for i, value in top) for top in tops)
            _tell(listener, Scored(item.key, tuple(values), is_greedy, likeliest))


def _tell(listener: Listener, event: Scored | Failed) -> None:
    try:
        listener(event)
    except Exception:  # of one who asked: the others get theirs
        traceback.print_exc(file=sys.stderr)
