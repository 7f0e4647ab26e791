"""Every command of the pages about jobs runs, with small models under the names of the pages.

Blocks marked `bash` are run, in their order and in one folder; downloads stand in plain blocks.
Sizes are lowered (`SMALLER`), nothing else is changed.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from stageline.data.text.processor import save_processor
from tests.helpers.forked_entry import run_entry
from tools.tiny_model import make

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ("finetune_vlm_vsr", "finetune_32b_qlora", "from_llamafactory", "from_trl")
# a name of the pages -> the family of the model in its place
MODELS = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "OpenGVLab/InternVL3-8B-hf": "internvl",
    "Qwen/Qwen2.5-32B-Instruct": "qwen3",
    "Qwen/Qwen2.5-7B-Instruct": "qwen3",
}
RUN = {
    **{"--total-steps": 2, "--warmup-steps": 0, "--eval-steps": 0, "--eval-samples": 2},
    **{"--batch-size": 4, "--micro-batch-size": 2, "--max-token-num": 512, "--num-stages": 2},
    **{"--timeline-step": 0, "--prove-split": "never", "--save-steps": 0, "--device": "cpu"},
}
OF_STEPS = ("--total-steps", "--warmup-steps", "--eval-steps")
SMALLER = {
    "train": RUN,
    "plan": RUN,
    "validate": RUN,
    "eval": {"--limit": 4, "--bootstrap.resamples": 20, "--num-stages": 1, "--device": "cpu"},
    "export": {},
}


def commands(page):
    """Return (verb, words) of the commands of a page; a program of tools/ is a verb, too."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    found = [shlex.split(line) for line in lines.splitlines() if line.strip()]
    return [one[1:] for one in found if one[0] == "stageline" or is_tool(*one[1:2])]


def is_tool(word=""):
    return word.startswith("tools/")


def smaller(words, options):
    words = list(words)
    if "--num-train-epochs" in words:  # in the place of steps; both at once are refused
        options = {name: value for name, value in options.items() if name not in OF_STEPS}
        options |= {"--num-train-epochs": 0.5, "--eval-steps": "epoch"}
    for option, value in options.items():
        if option in words:
            words[words.index(option) + 1] = str(value)
        else:
            words += [option, str(value)]
    if "--partition" in words:
        words[words.index("--partition") + 1] = "uniform"
    return words


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Family -> the folder of a small model with weights."""
    made = {}
    for family in set(MODELS.values()):
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(1)
        config, processor = make(family)
        sees = getattr(config, "vision_config", None) is not None
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        auto.from_config(config).save_pretrained(folder)
        save_processor(processor, folder)
        made[family] = folder
    return made


@pytest.fixture
def folder(tmp_path, models):
    """Make the files that the pages expect in the working folder."""
    shutil.copytree(ROOT / "tests/samples/vsr", tmp_path / "vsr")
    shutil.copytree(tmp_path / "vsr/splits/random", tmp_path / "vsr/splits/zeroshot")
    shutil.copytree(tmp_path / "vsr/images", tmp_path / "images")
    photographs = sorted(path.name for path in (tmp_path / "images").iterdir())
    texts = [("user", "<image>Which way does it face?"), ("assistant", "Left.")]
    messages = [{"role": role, "content": text} for role, text in texts]
    rows = [
        {"messages": messages, "images": [photographs[n % len(photographs)]]} for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data").mkdir()
    for name in ("instruct", "preference"):
        rows = (ROOT / f"data/manpages_{name}.jsonl").read_text().splitlines()
        (tmp_path / f"data/manpages_{name}.jsonl").write_text("\n".join(rows[:100]) + "\n")
    info = {"identity": {"file_name": "rows.json"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    rows = [{"instruction": f"Say {number}.", "output": str(number)} for number in range(20)]
    (tmp_path / "data/rows.json").write_text(json.dumps(rows))
    theirs = {"model_name_or_path": str(models["qwen3"]), "stage": "sft", "dataset": "identity"}
    theirs |= {"finetuning_type": "lora", "template": "qwen3", "max_steps": 2, "save_steps": 2}
    (tmp_path / "qwen3_lora_sft.yaml").write_text(yaml.safe_dump(theirs))
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, folder, models):
    found = commands(page)
    assert found, "a page has commands"
    for verb, *words in found:
        if any(word.endswith("job.yaml") for word in words):
            words = words if is_tool(verb) else [*words, "--device", "cpu"]
        else:
            words = smaller(words, SMALLER[verb])
        words = [str(models[MODELS[word]]) if word in MODELS else word for word in words]
        entry = [ROOT / verb] if is_tool(verb) else ["-m", "stageline", verb]
        done = run_entry([*entry, *words], cwd=folder, timeout=240)
        assert done.returncode == 0, f"{verb} {shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    if page == "finetune_vlm_vsr":
        check_runs_of_vsr(folder / "runs")


def check_runs_of_vsr(runs):
    """Find adapters of only the language model, weights without the tower's, and a comparison."""
    adapter = next(runs.glob("vsr-lora/checkpoints/step-*/adapter_config.json")).parent
    names = [name for file in adapter.glob("*.safetensors") for name in load_file(file)]
    assert names and all("lora_" in name and "visual" not in name for name in names)
    assert list(runs.glob("vsr-full/checkpoints/best/model*.safetensors"))
    report = json.loads((runs / "vsr-lora/random/report.json").read_text())
    assert report["num_samples"] == 4 and "comparison" in report
    assert "category" in report["groupings"]


# -- tables ----------------------------------------------------------------------------------------


def test_the_page_about_trl_has_every_field():
    import dataclasses

    from peft import LoraConfig
    from transformers import TrainingArguments
    from trl import DPOConfig, RewardConfig, SFTConfig

    text = (DOCS / "from_trl.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text))
    common = {field.name for field in dataclasses.fields(TrainingArguments)}
    for config in (SFTConfig, DPOConfig, RewardConfig, LoraConfig):
        for field in dataclasses.fields(config):
            assert field.name in common or field.name in named, field.name
    first_column = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    known = common | {field.name for field in dataclasses.fields(LoraConfig)}
    for config in (SFTConfig, DPOConfig, RewardConfig):
        known |= {field.name for field in dataclasses.fields(config)}
    for name in re.findall(r"`([a-z]\w*)`", " ".join(first_column)):
        assert name in known, f"{name} is no field of theirs"
