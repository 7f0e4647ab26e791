"""A training run on pictures with workers is, to the bit, the run without."""

import json

import numpy
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from commands import train as train_pp  # noqa: F401 - its engines, before a fixture keeps registers as they are
from tests.helpers.small_run import Job, saved_tensors
from tests.helpers.tiny_models import tiny_config, tiny_processor

OPTIONS = (
    "--image-token auto --prompt vqa --total-steps 5 --max-token-num 256 --eval-samples 3 "
    "--eval-steps 2 --save-steps 5 --parts.vit.frozen"
).split()


class PictureJob(Job):
    """A folder with a tiny InternVL, its processor, and rows of no, one and several pictures."""

    def __init__(self, folder):
        self.folder, self.family = folder, "internvl"
        self.model, self.rows = folder / "model", folder / "rows.jsonl"
        processor = tiny_processor("internvl")
        processor.save_pretrained(self.model)
        torch.manual_seed(1)
        config = tiny_config(
            "internvl", vocab_size=len(processor.tokenizer), max_position_embeddings=256
        )
        AutoModelForImageTextToText.from_config(config).save_pretrained(self.model)
        draw = numpy.random.default_rng(3)
        rows = []
        for row in range(20):
            names = [f"{row}-{number}.jpg" for number in range(row % 3)]
            for name in names:
                height, width = draw.integers(9, 70, 2)
                pixels = draw.integers(0, 256, (height, width, 3), dtype=numpy.uint8)
                Image.fromarray(pixels).save(folder / name)
            rows.append(
                {"id": str(row), "question": f"{row}?", "answer": "!" * (1 + row % 7)}
                | ({"image": names} if names else {})
            )
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def log(self, name):
        lines = (self.folder / name / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return PictureJob(tmp_path_factory.mktemp("pictures"))


def test_losses_and_weights_are_equal_with_workers(job):
    for name, count in (("plain", 0), ("workers", 2)):
        done = job.fork(name, *OPTIONS, "--num-workers", count)
        assert done.code == 0, done.err
    for record, other in zip(job.log("workers"), job.log("plain"), strict=True):
        assert (record["kind"], record["loss"]) == (other["kind"], other["loss"])
    final, found = (
        saved_tensors(job.folder / name / "checkpoints/step-00000005")
        for name in ("plain", "workers")
    )
    assert found.keys() == final.keys()
    assert all(torch.equal(found[key], value) for key, value in final.items())
    steps = [record for record in job.log("plain") if record["kind"] == "train"]
    assert all(0 < record["data_wait"] < record["seconds"] for record in steps)


def test_tiles_of_the_options_are_in_the_saved_processor(job):
    done = job.fork("tiles", *OPTIONS, "--images.max_tiles", 2, "--eval-samples", 0)
    assert done.code == 0, done.err
    folder = job.folder / "tiles/checkpoints/step-00000005"
    texts = [path.read_text() for path in folder.glob("*processor*.json")]
    assert any('"max_patches": 2' in text for text in texts)


def test_an_image_above_the_limit_ends_the_run_before_the_model(job):
    done = job.fork("limit", *OPTIONS, "--images.pixel_limit", 500)
    assert done.code == 3 and "at most 500 are decoded (--images.pixel_limit)" in done.err
    assert "sample" in done.err and ".jpg" in done.err
