"""Cards for the tests in this folder: a real one, an emulated one, or none, and then they skip."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stageline.modules import recompute
from stageline.training.step import StepResult, TrainStep

if TYPE_CHECKING:
    from tests.helpers.emulated_gpu.cards import Cards


def _emulated() -> "Cards | None":
    from tests.helpers.emulated_gpu.cards import Cards

    return Cards.entered


def pytest_configure(config: pytest.Config) -> None:
    """Marks of the tests in here."""
    config.addinivalue_line("markers", "cards(n, needs=n): how many are emulated; needs true ones")
    config.addinivalue_line("markers", "real: needs a true card, for its kernels or its time")


@pytest.fixture(autouse=True)
def _on_a_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """One card, or as many as a test is marked with; a race that it leaves unread fails it."""
    marked = request.node.get_closest_marker("cards")
    wanted = marked.args[0] if marked else 1
    emulated = _emulated()
    if emulated is None:
        needed = marked.kwargs.get("needs", wanted) if marked else 1
        have = torch.accelerator.device_count()
        if have < needed:
            pytest.skip(f"needs {needed} cards, and {have} are here, none emulated")
        yield
        return
    if request.node.get_closest_marker("real"):
        pytest.skip("needs a true card, and this one is emulated")
    emulated.count = wanted
    emulated.clear()
    yield
    assert not emulated.races, "\n".join(emulated.races)


@pytest.fixture
def cards() -> "Cards":
    """Return the emulated cards, for tests of what only they can see."""
    emulated = _emulated()
    if emulated is None:
        pytest.skip("looks at what emulated cards have seen, and this card is real")
    return emulated


class Seen:
    """The record of the cards of forked ranks, which each rank writes when it ends."""

    def __init__(self, cards: "Cards", folder: Path) -> None:
        self.cards, self.folder = cards, folder
        self.waits: Counter[str] = Counter()  # they are counted in the last step

    def write(self) -> None:
        found = {
            "races": dict(self.cards.races),
            "works": sum(self.cards.works.values()),
            "groups": self.cards.groups,
            "waits": self.waits,
            # without the place, which differs between the first rank and the others
            "collectives": [each.partition(" at ")[0] for each in self.cards.collectives],
        }
        (self.folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))

    def assert_clean(self, ranks: int) -> list[dict[str, int]]:
        """Check that no race was seen, and that all ranks made the same groups and exchanges.

        Returns:
            How and where the host waited in the last step of each rank -> how often.
        """
        files = sorted(self.folder.glob("*.json"))
        found = [json.loads(file.read_text()) for file in files]
        assert [int(file.stem) for file in files] == list(range(ranks))
        for one in found:
            # otherwise one waits in gloo, the other in NCCL; the order may differ, as saving has a
            # thread
            assert sorted(one["collectives"]) == sorted(found[0]["collectives"])
            assert one["groups"] == found[0]["groups"]
            assert one["works"] > 100 and not one["races"], "\n".join(one["races"])
        return [one["waits"] for one in found]


@pytest.fixture
def seen(cards: "Cards", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Return the records of the ranks that a test forks."""
    found, leave = Seen(cards, tmp_path), os._exit

    def tell_and_leave(code: int) -> None:
        found.write()
        leave(code)

    def watched(*args: Any, **kwargs: Any) -> StepResult:
        before = Counter(cards.waits)
        result = step(*args, **kwargs)
        found.waits = Counter()
        for wait, count in (cards.waits - before).items():
            found.waits[f"{wait.kind}: {wait.library or wait.place}"] += count
        return result

    step = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", watched)
    monkeypatch.setattr(os, "_exit", tell_and_leave)
    monkeypatch.setattr(recompute, "MIN_BYTES", 0)  # activations of tiny models move, too
    return found
