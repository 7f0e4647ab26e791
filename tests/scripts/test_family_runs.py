"""Real runs of families whose code around the layers is special: trained, resumed, exported.

`check_model.py` compares three steps with plain transformers on forked ranks; runs through
`train_pp.py` are resumed on another number of stages and exported.
"""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from export import make_stages
from stageline.checking.shrink import layer_period, shrink_config
from stageline.checkpoint.export import export_folder
from stageline.testing.family_configs import family_config
from stageline.testing.small_run import Job
from stageline.testing.tiny_tokenizers import tiny_tokenizer
from tests.scripts.test_check_model import check, failed

TEXT = ("granite", "lfm2", "falcon_h1", "gemma3n_text")
VISION = ("qwen3_5", "glm4v")
WAYS = {
    "full 1f1b": "--num-stages 2 --schedule 1f1b",
    "lora zbv": "--num-stages 4 --schedule zbv --llm-lora-num 1",
}
STEPS = ("--total-steps", 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> a folder with a cut-down model and a tokenizer."""
    made = {}
    for family in (*TEXT, *VISION):
        folder = tmp_path_factory.mktemp(family)
        config = family_config(family)
        config = shrink_config(config, num_layers=max(4, layer_period(config)))
        auto_class = AutoModelForCausalLM if family in TEXT else AutoModelForImageTextToText
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(folder / "tokenizer")  # beside a tower, a processor is looked for
        text = config.get_text_config(decoder=True)
        text.vocab_size = max(text.vocab_size, len(tokenizer))
        if hasattr(text, "vocab_size_per_layer_input"):
            text.vocab_size_per_layer_input = text.vocab_size
        torch.manual_seed(1)
        auto_class.from_config(config).save_pretrained(folder)
        made[family] = folder
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_three_steps_equal_plain_transformers(family, way, folders, tmp_path):
    key = "causal_lm" if family in TEXT else "vision_language"
    words = f"--train-model {key} {WAYS[way]} --check-steps 3"
    code, report = check(tmp_path, words, model=folders[family])
    # without a processor there is no row about pictures: tests/shelf/test_families.py has them
    assert (code, failed(report)) == (0, {}), report
    assert "of transformers" in report["facts"]["compared with"]


@pytest.mark.parametrize("lora", [(), ("--llm-lora-num", 1)], ids=["full", "lora"])
@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_runs_are_resumed_on_other_stages_and_exported(family, lora, folders, tmp_path):
    key = "causal_lm" if family in TEXT else "vision_language"
    job = Job(tmp_path, family=key, make_model=False)
    job.model = folders[family]
    options = (*STEPS, *lora, "--processor-path", job.model / "tokenizer")
    done = job.fork("two", *options, waits=True)
    assert done.code == 0, done.err
    point = tmp_path / "two" / "checkpoints" / "step-00000002"
    done = job.fork("three", *options, "--resume", point, ranks=3)
    assert done.code == 0, done.err
    before, after = job.losses("two"), job.losses("three")
    assert set(after) == {3, 4} and before[1] != before[4]
    for step, loss in after.items():
        assert loss == pytest.approx(before[step], rel=1e-4)
    saved = tmp_path / "two" / "checkpoints" / "step-00000004"
    report = export_folder(saved, tmp_path / "out", merge=bool(lora), make_stages=make_stages)
    assert report.verdict is not None and report.verdict.difference <= report.verdict.tolerance
    auto_class = AutoModelForCausalLM if family in TEXT else AutoModelForImageTextToText
    _, info = auto_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
