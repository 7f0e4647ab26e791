"""Bytes that large bodies may take at one time: who comes later waits, in order."""

import asyncio
from collections import deque


class ByteBudget:
    """A number of bytes that is given out and taken back, in one event loop.

    Args:
        most: never more is given out; nobody may ask for more at once.

    Attributes:
        num_taken: given out now.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Waits until so many bytes are free."""
        if not self._waiting and self.num_taken + size <= self.most:
            self.num_taken += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)  # it had just become ours
            else:
                self._waiting = deque(item for item in self._waiting if item[1] is not turn)
                self.give(0)  # who waited behind may fit
            raise

    def give(self, size: int) -> None:
        """Gives bytes back."""
        self.num_taken -= size
        while self._waiting and self.num_taken + self._waiting[0][0] <= self.most:
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.num_taken += wanted
                turn.set_result(None)
