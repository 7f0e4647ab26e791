"""Rows whose last tokens are scored: what waits, what is on its way, who is told."""

import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from stageline.inference.decoding.request import (
    Cancelled,
    EngineError,
    Failed,
    PassOrder,
    Scored,
    ScoreRequest,
)

# -- prompts of single requests -> the inputs of one pass, padded on the left ---------------------

Prompt = Mapping[str, torch.Tensor]
MASK = "attention_mask"  # made from the lengths, on each stage


def length_of(prompt: Prompt) -> int:
    """Tokens of a prompt."""
    return prompt["input_ids"].shape[1]


def no_cells(prompt: Prompt) -> int:
    """What images take in the cache besides their tokens, where models see them as tokens."""
    return 0


def is_alone(prompt: Prompt) -> bool:
    """Whether it is read by itself: what images bring is not padded to that of others."""
    shape = prompt["input_ids"].shape
    return any(value.shape != shape or value.is_floating_point() for value in prompt.values())


def padded_right(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Rows of ids of several lengths as `input_ids` [B, T]."""
    ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row)] = torch.tensor(row)
    return {"input_ids": ids_BT}


def without_last(prompt: Prompt) -> Prompt:
    """The prompt without its last token, and what else has a value for each token."""
    return part_of(prompt, range(length_of(prompt) - 1))


def part_of(prompt: Prompt, piece: range) -> Prompt:
    """Some tokens of the prompt that follow one another, and what else has a value for each."""
    shape = prompt["input_ids"].shape
    own = slice(piece.start, piece.stop)
    return {name: v[:, own] if v.shape == shape else v for name, v in prompt.items()}


def together(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """The inputs [B, T] of several prompts that are not alone, or those of one."""
    if len(prompts) == 1:
        return {name: value for name, value in prompts[0].items() if name != MASK}
    width = max(length_of(prompt) for prompt in prompts)
    names = [name for name in prompts[0] if name != MASK]
    padded = {}
    for name in names:
        rows = torch.zeros(len(prompts), width, dtype=prompts[0][name].dtype)
        for place, prompt in enumerate(prompts):
            if name in prompt:
                rows[place, width - length_of(prompt) :] = prompt[name][0]
        padded[name] = rows
    return padded


# -------------------------------------------------------------------------------------------------

_Listener = Callable[[Scored | Failed], None]
_Row = tuple[ScoreRequest, _Listener]


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

    def add(self, item: ScoreRequest, listener: _Listener) -> None:
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

    def next_order(self) -> tuple[PassOrder, dict[str, torch.Tensor]]:
        """The next pass and what it reads."""
        rows: list[_Row] = []
        while self.waiting and self._goes_with(rows, self.waiting[0][0]):
            rows.append(self.waiting.popleft())
        self._on_their_way.append(rows)
        items = [item for item, _ in rows]
        order = PassOrder(
            "score",
            rows=list(range(len(items))),
            lengths=[length_of(item.prompt) - 1 for item in items],
            targets=[item.prompt["input_ids"][0, -item.num_targets :].tolist() for item in items],
            num_tops=[item.num_top for item in items],
        )
        # nothing follows the last token: a row may be one longer than the model has positions
        return order, together([without_last(item.prompt) for item in items])

    def _goes_with(self, rows: list[_Row], new: ScoreRequest) -> bool:
        if not rows:
            return True
        if is_alone(rows[0][0].prompt) or is_alone(new.prompt):
            return False
        width = max(length_of(item.prompt) for item in [*(row[0] for row in rows), new])
        return width * (len(rows) + 1) <= self.max_tokens

    def take(self, order: PassOrder) -> None:
        """The oldest pass is back."""
        for place, (item, listener) in enumerate(self._on_their_way.popleft()):
            if order.error is not None:
                _tell(listener, Failed(item.key, EngineError(order.error)))
                continue
            values, is_greedy, tops = order.scores[place]
            likeliest = tuple(tuple((int(i), value) for i, value in top) for top in tops)
            _tell(listener, Scored(item.key, tuple(values), is_greedy, likeliest))


def _tell(listener: _Listener, event: Scored | Failed) -> None:
    try:
        listener(event)
    except Exception:  # of one who asked: the others get theirs
        traceback.print_exc(file=sys.stderr)
