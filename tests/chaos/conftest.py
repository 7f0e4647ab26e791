"""Import what the entry file needs, once: forked runs start from there and take a second.

It also has the model folders that tests of broken files begin with.
"""

import shutil

import pytest

from commands import train as train_pp  # noqa: F401
from stageline.checkpoint.save import save_split_model
from tests.helpers.faulty_files import load
from tests.helpers.tiny_checkpoints import tiny_whole


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Return a model folder as a run saves it: two shards, and the weights of a whole llama."""
    folder = tmp_path_factory.mktemp("originals")
    tiny_whole("llama", folder / "whole", max_shard_size="1GB")
    stages = [load(folder / "whole", stage=stage) for stage in range(2)]
    save_split_model(stages, None, folder / "saved", step=2)
    return folder


@pytest.fixture
def saved(originals, tmp_path):
    return shutil.copytree(originals / "saved", tmp_path / "saved")


@pytest.fixture
def whole(originals, tmp_path):
    """Return a folder of another program: one file, no manifest."""
    return shutil.copytree(originals / "whole", tmp_path / "whole")
