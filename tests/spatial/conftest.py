"""Gives tests the components that runs get by `--import examples.spatial.parts`."""

import sys

import pytest

from register import import_parts


@pytest.fixture
def parts():
    """Registers them for one test; forked runs of other tests import the module themselves."""
    name = "examples.spatial.parts"
    sys.modules.pop(name, None)
    import_parts([name])
    yield
    sys.modules.pop(name, None)
