"""Real runs of families whose code around the layers is special: trained, resumed, exported.

`check_model.py` compares three steps with plain transformers on forked ranks; runs through
`train_pp.py` are resumed on another number of stages and exported.
"""

import json
from itertools import cycle

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from commands.export import make_stages
from stageline.data.text.processor import save_processor
from stageline.shrink import layer_period, shrink_config
from tests.helpers.exports import export_folder
from tests.helpers.family_configs import family_config
from tests.helpers.small_run import Job
from tests.helpers.tiny_models import tiny_processor
from tests.scripts.test_check_model import check, failed
from tools.tiny_model import make

TEXT = ("lfm2", "gemma3n_text")
VISION = ("qwen3_5",)
WAYS = {
    "full 1f1b": "--num-stages 2 --schedule 1f1b",
    "lora zbv": "--num-stages 4 --schedule zbv --llm-lora-num 1",
}
STEPS = ("--total-steps", 2, "--save-steps", 1)
IMAGE_SIZES = ((16, 16), (32, 16), (20, 28))  # width and height, in turn
# the configuration's ids of special tokens, by the tokens of tiny_models.py
SPECIAL_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> a folder with a cut-down model and its tokenizer or processor."""
    made = {}
    for family in (*TEXT, *VISION):
        folder = tmp_path_factory.mktemp(family)
        auto_class = AutoModelForCausalLM if family in TEXT else AutoModelForImageTextToText
        if family in TEXT:
            config, tokenizer = make(family)
            tokenizer.save_pretrained(folder)
        else:
            config = family_config(family)
            config = shrink_config(config, num_layers=max(4, layer_period(config)))
            processor = tiny_processor("qwen3_vl")
            save_processor(processor, folder)
            for name, token in SPECIAL_IDS.items():
                setattr(config, name, processor.tokenizer.convert_tokens_to_ids(token))
            text = config.get_text_config(decoder=True)
            text.vocab_size = max(text.vocab_size, len(processor.tokenizer) + 8)
        torch.manual_seed(1)
        auto_class.from_config(config).save_pretrained(folder)
        made[family] = folder
    return made


@pytest.mark.parametrize(("family", "way"), zip((*TEXT, *VISION), cycle(WAYS)))
def test_three_steps_equal_plain_transformers(family, way, folders, tmp_path):
    key = "causal_lm" if family in TEXT else "vision_language"
    words = f"--train-model {key} {WAYS[way]} --check.steps 3"
    code, report = check(tmp_path, words, model=folders[family])
    assert (code, failed(report)) == (0, {}), report
    names = [row["name"] for row in report["checks"]]
    assert ("image changes the loss" in names) == (family in VISION)
    assert "of transformers" in report["facts"]["compared with"]


@pytest.mark.parametrize(
    ("family", "lora"), [("gemma3n_text", ("--llm-lora-num", 1)), ("qwen3_5", ())]
)
def test_runs_are_resumed_on_other_stages_and_exported(family, lora, folders, tmp_path):
    key = "causal_lm" if family in TEXT else "vision_language"
    job = Job(tmp_path, family=key, num_layers=4, make_model=False)
    job.model = folders[family]
    options = (*STEPS, *lora)
    if family in VISION:
        _add_pictures(job.rows)
        options = (*options, "--image-token", "auto", "--prompt", "vqa", "--max-token-num", 128)
    job.train("two", *options)
    point = tmp_path / "two" / "checkpoints" / "step-00000001"
    job.train("three", *options, "--resume", point, ranks=3)
    before, after = job.losses("two"), job.losses("three")
    assert before[1] != before[2]
    assert after == {2: pytest.approx(before[2], rel=1e-4)}
    saved = tmp_path / "two" / "checkpoints" / "step-00000002"
    report = export_folder(saved, tmp_path / "out", merge=bool(lora), make_stages=make_stages)
    assert report.verdict is not None and report.verdict.difference <= report.verdict.tolerance
    auto_class = AutoModelForCausalLM if family in TEXT else AutoModelForImageTextToText
    _, info = auto_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")


def _add_pictures(path):
    """Each row of the file asks about a picture of its own."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for index, row in enumerate(rows):
        row["image"] = f"{index}.png"
        noise = np.random.default_rng(index)
        width, height = IMAGE_SIZES[index % len(IMAGE_SIZES)]
        pixels = noise.integers(0, 256, size=(height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path.parent / row["image"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
