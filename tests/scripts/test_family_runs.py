"""Real runs of families whose code around the layers is special: trained, resumed, exported.

`check_model.py` compares three steps with plain transformers on forked ranks; runs through
`train_pp.py` are resumed on another number of stages and exported.
"""

from itertools import cycle

import pytest
import torch
import transformers
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


def test_a_run_is_resumed_on_other_stages_and_exported(folders, tmp_path):
    """An adapter of a family whose layers exchange more than hidden states."""
    job = Job(tmp_path, family="causal_lm", num_layers=4, make_model=False)
    job.model = folders["gemma3n_text"]
    options = ("--total-steps", 2, "--save-steps", 1, "--llm-lora-num", 1)
    job.train("two", *options)
    checkpoints = tmp_path / "two" / "checkpoints"
    job.train("three", *options, "--resume", checkpoints / "step-00000001", ranks=3)
    before, after = job.losses("two"), job.losses("three")
    assert before[1] != before[2]
    assert after == {2: pytest.approx(before[2], rel=1e-4)}
    saved = checkpoints / "step-00000002"
    report = export_folder(saved, tmp_path / "out", merge=True, make_stages=make_stages)
    assert report.verdict is not None and report.verdict.difference <= report.verdict.tolerance
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
