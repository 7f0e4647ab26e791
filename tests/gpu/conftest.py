"""What tests in here run on: a real card, an emulated one, or none, and then they skip."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.helpers.emulated_gpu.cards import Cards


def _emulated() -> "Cards | None":
    if torch.version.cuda or torch.version.hip:
        return None
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
    """The emulated cards, for tests of what only they can see."""
    emulated = _emulated()
    if emulated is None:
        pytest.skip("looks at what emulated cards have seen, and this card is real")
    return emulated
