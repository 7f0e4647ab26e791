"""What the guards of a run tell each other, in the TCP store: signs of life, and who stops."""

import json
from typing import TYPE_CHECKING

from stageline.distributed.board import claim_key
from stageline.distributed.heartbeat import Beat

if TYPE_CHECKING:
    from torch.distributed import TCPStore


class Bulletin:
    """The store's side of a guard.

    Args:
        store: a connection of the guard's own.
    """

    def __init__(self, store: "TCPStore", *, num_ranks: int) -> None:
        self.store = store
        self.num_ranks = num_ranks
        self.key = claim_key()

    def post(self, beat: Beat) -> None:
        """Puts the beat of this rank in the place of the one before."""
        self.store.set(self._beat(beat.rank), beat.to_json())

    def beats(self) -> dict[int, Beat]:
        """The latest beat of each rank that has sent one."""
        ranks = [rank for rank in range(self.num_ranks) if self.store.check([self._beat(rank)])]
        texts = (self.store.get(self._beat(rank)).decode() for rank in ranks)
        return dict(zip(ranks, map(Beat.from_json, texts), strict=True))

    def claim(self) -> dict | None:
        """The claim of the rank that failed first."""
        return json.loads(self.store.get(self.key)) if self.store.check([self.key]) else None

    def ask(self, signum: int) -> None:
        """Tells all ranks of a signal that asks for a stop."""
        self.store.set(f"{self.key}/stop", str(signum))

    def asked(self) -> int | None:
        """The signal that a rank was told to stop by."""
        key = f"{self.key}/stop"
        return int(self.store.get(key)) if self.store.check([key]) else None

    def _beat(self, rank: int) -> str:
        return f"{self.key}/beat/{rank}"


class OwnBulletin:
    """For a single process: it hears itself."""

    def __init__(self) -> None:
        self._beats: dict[int, Beat] = {}

    def post(self, beat: Beat) -> None:
        """As `Bulletin.post`."""
        self._beats[beat.rank] = beat

    def beats(self) -> dict[int, Beat]:
        """As `Bulletin.beats`."""
        return dict(self._beats)

    def claim(self) -> dict | None:
        """Nobody else claims."""
        return None

    def ask(self, signum: int) -> None:
        """There is nobody to tell."""

    def asked(self) -> int | None:
        """Nobody else asks."""
        return None
