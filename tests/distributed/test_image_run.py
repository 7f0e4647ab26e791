"""A training run on pictures with workers is, to the bit, the run without."""

import pytest

from commands import train as train_pp  # noqa: F401 - its engines, before a fixture keeps registers as they are
from tests.helpers.small_run import assert_same_tensors
from tests.helpers.small_vision_run import VisionJob

OPTIONS = (
    "--total-steps 5 --max-token-num 256 --eval-samples 3 --eval-steps 2 --save-steps 5 "
    "--parts.vit.frozen"
).split()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return VisionJob(tmp_path_factory.mktemp("pictures"))


def test_losses_and_weights_are_equal_with_workers(job):
    for name, count in (("plain", 0), ("workers", 2)):
        job.train(name, *OPTIONS, "--num-workers", count)
    for kind in ("train", "eval"):
        losses = [[r["loss"] for r in job.records(name, kind)] for name in ("plain", "workers")]
        assert losses[0] == losses[1] != []
    assert [record["step"] for record in job.records("plain", "eval")] == [0, 2, 4, 5]
    last = "checkpoints/step-00000005"
    assert_same_tensors(job.folder / "workers" / last, job.folder / "plain" / last)
    assert all(0 < record["data_wait"] < record["seconds"] for record in job.records("plain"))


def test_tiles_of_the_options_are_in_the_saved_processor(job):
    job.train("tiles", *OPTIONS, "--images.max_tiles", 2, "--eval-samples", 0)
    folder = job.folder / "tiles/checkpoints/step-00000005"
    texts = [path.read_text() for path in folder.glob("*processor*.json")]
    assert any('"max_patches": 2' in text for text in texts)


def test_an_image_above_the_limit_ends_the_run_before_the_model(job):
    done = job.fork("limit", *OPTIONS, "--images.pixel_limit", 500)
    assert done.code == 3 and "at most 500 are decoded (--images.pixel_limit)" in done.err
    assert "sample" in done.err and ".png" in done.err
