"""Rows whose last tokens are scored: what waits, what is on its way, what is done."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from stageline.inference.decoding import prompts
from stageline.inference.decoding.order import Order
from stageline.inference.decoding.request import EngineError, Failed, Scored, ScoreRequest


class ScoreQueue:
    """Rows are scored in their order, so many together as a pass may have tokens.

    Args:
        max_tokens: of one pass, with padding; a longer row goes alone.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.waiting: deque[ScoreRequest] = deque()
        self.done: deque[Scored | Failed] = deque()
        self._on_their_way: deque[list[ScoreRequest]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether something waits or is on its way."""
        return bool(self.waiting or self._on_their_way)

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
                    self.waiting.append(item)
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

    def next_order(self) -> tuple[Order, list[prompts.Prompt]]:
        """The next pass and the rows that it reads."""
        items: list[ScoreRequest] = []
        while self.waiting and self._goes_with(items, self.waiting[0]):
            items.append(self.waiting.popleft())
        self._on_their_way.append(items)
        order = Order(
            "score",
            rows=list(range(len(items))),
            lengths=[prompts.length_of(item.prompt) - 1 for item in items],
            targets=[item.prompt["input_ids"][0, -item.num_targets :].tolist() for item in items],
        )
        # nothing follows the last token: a row may be one longer than the model has positions
        return order, [prompts.without_last(item.prompt) for item in items]

    def _goes_with(self, items: list[ScoreRequest], new: ScoreRequest) -> bool:
        if not items:
            return True
        if prompts.is_alone(items[0].prompt) or prompts.is_alone(new.prompt):
            return False
        width = max(prompts.length_of(item.prompt) for item in [*items, new])
        return width * (len(items) + 1) <= self.max_tokens

    def take(self, order: Order) -> None:
        """The oldest pass is back."""
        for place, item in enumerate(self._on_their_way.popleft()):
            if order.error is not None:
                self.done.append(Failed(item.key, EngineError(order.error)))
            else:
                values, is_greedy = order.scores[place]
                self.done.append(Scored(item.key, tuple(values), is_greedy))
