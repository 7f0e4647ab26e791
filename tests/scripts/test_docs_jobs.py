"""Every command of the pages runs, with small models and data under the names of the pages.

All pages share a folder in which a reader's files stand ready. Sizes are lowered (`SMALLER`), and
what is then equal runs once; a script runs with a Python that writes down what it is called with,
and that is run. Nothing else is changed. `CANNOT` has the commands that do not run here.
"""

import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from sklearn import datasets
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from commands import train_parts
from commands.command_line import COMMANDS
from options.command_line import read_options
from stageline.data.text.processor import save_processor
from tests.helpers.forked_entry import run_entry
from tests.helpers.ports import free_port
from tests.helpers.ready_venv import NotingVenv
from tests.helpers.tiny_corpora import documents, tiny_corpus
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer
from tests.unit.test_docs_commands import PAGES, commands_of
from tools.tiny_model import make

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
# the beginning of a command, or words in it -> why it does not run here
CANNOT = {
    "git clone": "network",
    "cd ": "the shell's",
    "source ": "the shell's",
    "sbatch ": "Slurm; test_multinode.py runs its script",
    "bash scripts/setup.sh": "network; test_set_up.py",
    "bash scripts/test.sh": "these tests",
    "bash scripts/test_versions.sh": "network",
    "bash scripts/gpu_check.sh": "GPUs or many minutes; test_gpu_check.py",
    "bash scripts/train_pp_multinode.sh": "two machines; test_multinode.py",
    "bash scripts/build_corpus.sh": "test_recipes.py runs it",
    "bash examples/spatial/study_spatial.sh": "12 minutes; tests/spatial runs its parts",
    "bash scripts/train_grpo_digits.sh": "needs the checkpoint of its first half",
    "python scripts/prepare_smollm2.py": "network",
    "python benchmarks/calculator.py": "two minutes of CPU time; test_turns.py has its environment",
    "python tools/convert_internvl.py": "a model of 16 GB; test_convert_internvl.py",
    "torchrun ": "test_docs_example.py runs it",
    "lm_eval ": "another program, which asks a server",
    "stageline lm-eval": "data sets of the hub; test_lm_eval_entry.py",
    "--server": "a server; test_dialogue.py",
    "--engine api": "a server",
    "--tracker wandb": "a package that is not needed, and an account",
    "--sweep": "starts four runs; test_runs.py",
    "--http.ssl_certfile": "a certificate",
    "--device cuda": "a GPU",
    "--import my_parts.py": "test_docs_example.py and test_docs_parts.py run it",
    "--dataset.info my_data": "sets whose rows are the reader's; test_sets.py",
}
# a name of the pages -> the model in its place
MODELS = {
    **{"Qwen/Qwen2.5-VL-7B-Instruct": "vision", "Qwen/Qwen2.5-32B-Instruct": ".cache/smollm2"},
    **{"Qwen/Qwen2.5-14B-Instruct@main": ".cache/smollm2", "org/model": ".cache/smollm2"},
    **{"Qwen/Qwen2.5-7B-Instruct": ".cache/smollm2", "owner/code-lora": "my_a"},
    **{"openai/gpt-oss-20b": ".cache/smollm2"},
    **{"Qwen/Qwen2.5-0.5B-Instruct": ".cache/smollm2", "my-group/my-lora": "my_a"},
}
ADAPTER = "runs/sft-lora-smollm2/checkpoints/best"
SAME = {  # files of a reader -> what stands there, once the examples have run
    **dict.fromkeys(("my_a", "my_b", "my_adapter", "runs/law/checkpoints/best"), ADAPTER),
    **dict.fromkeys(
        ("my_model", "my_base", "runs/X/checkpoints/best", "runs/X/merged"), ".cache/smollm2"
    ),
    "runs/b/checkpoints/best": "runs/digits-example/checkpoints/best",
}
RUN = {
    **{"--total-steps": 1, "--warmup-steps": 0, "--eval-steps": 0, "--eval-samples": 2},
    **{"--batch-size": 4, "--micro-batch-size": 2, "--max-token-num": 2000, "--num-stages": 1},
    **{"--timeline-step": 0, "--prove-split": "never", "--save-steps": 0, "--device": "cpu"},
    **{"--partition": "uniform", "--num-workers": 0},
}
DECODE = {"--num-stages": 1, "--device": "cpu", "--prove-split": "never"}
SMALLER = {
    **dict.fromkeys(("train", "validate"), RUN),
    "plan": {**RUN, "--batch-size": 2, "--micro-batch-size": 1},  # it measures doubles and halves
    "eval": {**DECODE, "--limit": 2, "--bootstrap.resamples": 10, "--max-new-tokens": 3},
    "infer": {**DECODE, "--limit": 2, "--max-new-tokens": 3},
    "chat": {"--max-new-tokens": 3, "--device": "cpu"},
    "serve": DECODE,
    "check": {"--device": "cpu"},
    "corpus": {},
    "export": {},
}


def commands():
    """Return (page, words) of all commands that run, each once; examples and their makers first."""
    found = {}
    for path in EXAMPLES:
        line = path.read_text(encoding="utf-8").splitlines()[0]
        match = re.fullmatch(rf"# (stageline \w+ examples/{re.escape(path.name)})", line)
        assert match, f"the first line of {path.name} is {line!r}"
        found[match[1]] = path.stem
    found = dict(sorted(found.items(), key=lambda one: "stageline train" not in one[0]))
    for page in PAGES:
        for words in commands_of(page.read_text(encoding="utf-8")):
            found.setdefault(shlex.join(words), page.stem)
    return found


ALL = commands()


def reason(command):
    """Return why a command does not run here; empty: it does."""
    plain = " ".join(shlex.split(command))
    matches = [one for one in CANNOT if plain.startswith(one) or f" {one}" in f" {plain}"]
    return next(iter(matches), "")


def lowered(verb, words):
    """Return the words of a command with smaller values."""
    options = dict(SMALLER[verb])
    text = " ".join(words)
    if "--engine" in words and verb in ("eval", "infer"):
        if "device_map" in words:
            options.pop("--prove-split"), options.pop("--num-stages")
    elif verb in ("eval", "infer"):
        options = {k: v for k, v in options.items() if k not in ("--num-stages", "--prove-split")}
    if "--plan" in words and verb in ("infer", "chat"):
        options = {}
    if verb == "infer" and "--text" in words:
        options.pop("--limit", None)
    if verb in ("train", "plan", "validate"):
        if len(words) == 1 and verb == "train":  # an example as it is, with its stages
            options["--batch-size"] = 8
            del options["--num-stages"]
        if "--num-train-epochs" in words:  # in the place of steps; both at once are refused
            options.pop("--total-steps")
            options |= {"--num-train-epochs": 0.01, "--eval-steps": "epoch"}
        if "--warmup-ratio" in words:
            options.pop("--warmup-steps", None)
        if "--packing" in words or "pt_" in text:
            options["--max-token-num"] = 256
        if "contrastive" in text:
            options |= {"--batch-size": 8, "--micro-batch-size": 4}
        if "grpo" in text:
            options |= {"--rollouts.group_size": 2, "--rollouts.max_completion_length": 3}
        if "--global-batch-distributed" in words:
            options["--global-batch-distributed"] = "2,2"
        if "--dp-degree" in words:
            options["--batch-size"] = 8
        if "examples/" in text and any(name in words for name in ("--schedule", "--vision-stages")):
            options |= {"--num-stages": 4, "--batch-size": 16}
            options = {k: v for k, v in options.items() if k != "--partition"}
        elif "--schedule" in words:
            is_plain = words[words.index("--schedule") + 1] == "1f1b"
            options |= {"--num-stages": 2} if is_plain else {"--num-stages": 4, "--batch-size": 16}
        if "--engine" in words:
            options.pop("--num-stages")
        if "--lora.init" in words:
            options["--lora.rank"] = 4
        if "--resume" in words:
            options["--total-steps"] = 2
        if "job.yaml" in words:
            options = {"--device": "cpu"}
        if "--freeze.llama_pro" in words:
            options["--freeze.layers"] = 2
    words = list(words)
    for option, value in options.items():
        if option not in words:
            words += [option, str(value)]
        for place in [place for place, word in enumerate(words) if word == option]:
            words[place + 1] = str(value)
    return [re.sub("step-000000[0-9]+", "step-00000001", word) for word in words]


def vision_model(folder):
    torch.manual_seed(1)
    config, processor = make("qwen2_5_vl")
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    save_processor(processor, folder)


def text_model(folder, family="llama", **size):
    tokenizer = tiny_tokenizer(eos_token="<|im_end|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    size |= {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    config = tiny_config(family, tied=True, **size)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def rows_of(path, count=100):
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()[:count]]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Make the folder that commands run in, and the files that the pages expect there."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("examples", "scripts", "tools", "docs", "pyproject.toml", "requirements.lock"):
        (folder / name).symlink_to(ROOT / name)
    text_model(folder / ".cache/smollm2")
    # grouped products in bfloat16 want widths of a multiple of 8
    text_model(folder / "my_qwen3_moe", "qwen3_moe", hidden_size=32, moe_intermediate_size=16)
    vision_model(folder / "vision")
    runpy.run_path(str(ROOT / "scripts/make_digits_model.py"))["main"](
        str(folder / ".cache/digits-model")
    )
    shutil.copytree(folder / ".cache/smollm2", folder / ".cache/corpus-model")
    (folder / ".cache/corpus").mkdir()
    lengths = [(40, 30), (50,), (20, 20)] * 12
    tiny_corpus(folder / ".cache/corpus/guides", [documents(lengths)] * 2, seq_length=64)
    (folder / "data").mkdir()
    for file in (ROOT / "data").glob("*.jsonl"):
        write_rows(folder / "data" / file.name, rows_of(file))
    write_rows(folder / "data/english.jsonl", [{"text": "A line. " * 9}] * 40)
    (folder / "data/chinese.txt").write_text("一行文字。\n\n" * 40)
    messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    dialog = [{"who": "me", "text": "Hi?"}, {"who": "it", "text": "Hello."}]
    own = {"messages": messages, "dialog": dialog, "sys": "Be brief."}
    write_rows(folder / "my_rows.jsonl", [own] * 64)
    write_rows(folder / "text_rows.jsonl", [{"question": "Why?", "answer": "So."}] * 64)
    write_rows(folder / "texts.jsonl", [{"text": "a text"}] * 20)
    write_rows(folder / "corpus.jsonl", [{"text": "A line of a text."}] * 200)
    questions = [{"question": "Why?", "answer": "So.", "choices": ["So.", "No."]}] * 20
    write_rows(folder / "questions.jsonl", questions)
    write_rows(folder / "pairs.jsonl", rows_of("data/manpages_preference.jsonl"))
    (folder / "keys.txt").write_text("secret-of-a-test-0123456789\n")
    visual(folder)
    info = {"identity": {"file_name": "rows.json"}}
    (folder / "data/dataset_info.json").write_text(json.dumps(info))
    rows = [{"instruction": f"Say {number}.", "output": str(number)} for number in range(20)]
    (folder / "data/rows.json").write_text(json.dumps(rows))
    theirs = {"model_name_or_path": str(folder / ".cache/smollm2"), "stage": "sft"}
    theirs |= {"finetuning_type": "lora", "template": "qwen3", "max_steps": 1, "save_steps": 1}
    (folder / "qwen3_lora_sft.yaml").write_text(yaml.safe_dump(theirs | {"dataset": "identity"}))
    return folder


def visual(folder):
    """Make rows with images: those of a reader, VSR, and groups."""
    shutil.copytree(ROOT / "tests/samples/vsr", folder / "vsr")
    shutil.copytree(folder / "vsr/splits/random", folder / "vsr/splits/zeroshot")
    shutil.copytree(folder / "vsr/images", folder / "images")
    photographs = sorted(path.name for path in (folder / "images").iterdir())
    texts = [("user", "<image>Which way does it face?"), ("assistant", "Left.")]
    messages = [{"role": role, "content": text} for role, text in texts]
    rows = [
        {"messages": messages, "images": [photographs[n % len(photographs)]]} for n in range(20)
    ]
    write_rows(folder / "image_rows.jsonl", rows)
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    page = (DOCS / "contrastive.md").read_text(encoding="utf-8")
    row = json.loads(re.search(r"```json\n(.*?)\n```", page, re.DOTALL)[1])
    write_rows(folder / "my_groups.jsonl", [row] * 30)


@pytest.fixture(scope="module", autouse=True)
def light_runs():
    """Make the handwritten digits few, and leave out the planner before training (plan has it)."""
    digits = datasets.load_digits()
    for name in ("data", "images", "target"):
        digits[name] = digits[name][:460]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_digits", lambda *_, **__: digits)
        patch.setattr(train_parts, "place_together", lambda *_, **__: None)
        yield


def calls(words, world):
    """Return the words of each Python that a script starts, as run by a script of bash."""
    with tempfile.TemporaryDirectory() as folder:
        venv = NotingVenv(Path(folder), root=world)
        environment = {**os.environ, "STAGELINE_VENV": str(venv.folder)}
        if "evaluate.sh" in words[1]:
            environment["MODEL_PATH"] = "runs/digits-example/checkpoints/best"
        subprocess.run(words, cwd=world, env=environment, check=True, capture_output=True)
        return venv.commands()


def verb_and_words(words):
    """Return (command, its words) of a call of an entry file."""
    doors = {command.door: name for name, command in COMMANDS.items() if command.door}
    doors["train_pp.py"] = "train"
    return doors.get(Path(words[0]).name, ""), words[1:]


def program(words, world):
    """Return the entries to run for a command: lists of words behind `python`."""
    if words[0] == "bash":
        found = [verb_and_words(call) for call in calls(words, world)]
        started = [(verb, rest) for verb, rest in found if verb]
        assert started, f"{words} starts nothing"
    elif words[0] == "stageline":
        started = [(words[1], words[2:])] if words[1:] else [("", [])]
    else:
        assert words[0] == "python"
        more = [".cache/smollm2"] if "make_corpus_model" in words[1] else []
        return [[ROOT / words[1], *(re.sub("^6$", "2", one) for one in words[2:]), *more]]
    return [entry(verb, rest, world) for verb, rest in started]


def entry(verb, words, world):
    for name, path in MODELS.items():
        words = [re.sub(rf"(^|[=,]){re.escape(name)}$", rf"\g<1>{path}", one) for one in words]
    is_plain = verb not in SMALLER or "--help" in words
    words = words if is_plain else lowered(verb, words)
    for path in [one for one in words if one.startswith("examples/") and one.endswith(".yaml")]:
        for name, value in read_options((ROOT / path).read_text())[0].items():
            if name == "model-path" and value in MODELS and "--model-path" not in words:
                words = [*words, "--model-path", MODELS[value]]
    if verb == "corpus" and "--num-workers" in words:
        words[words.index("--num-workers") + 1] = "0"
    if verb == "corpus":
        words = ["runs/train" if one == "runs/X" else one for one in words]
    if verb == "serve":
        words += ["--port", str(free_port())]
    return ["-m", "stageline", *([verb] if verb else []), *words]


OUTPUTS = ("--output-dir", "--output-path")
_done = set()


def run(command, world):
    words = [one for one in shlex.split(command) if not re.fullmatch(r"[A-Z0-9_]+=.*", one)]
    if words[:2] == ["python", "tools/tiny_model.py"]:
        shutil.rmtree(world / words[3], ignore_errors=True)
    for one in program(words, world):
        key = re.sub(r"--(output-dir|port) \S+", "", shlex.join(map(str, one)))
        if key in _done:
            continue
        _done.add(key)
        outputs = [one[place + 1] for place, word in enumerate(one) if word in OUTPUTS]
        for output in [] if "--resume" in one else [*outputs, *["runs/train"] * ("train" in one)]:
            shutil.rmtree(world / output, ignore_errors=True)
        until = "serving " if "serve" in one else ""
        done = run_entry(one, cwd=world, timeout=120, until=until)
        shown = (
            f"{command}\n{shlex.join(map(str, one))}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        )
        assert done.returncode == (143 if until else 0), shown


@pytest.mark.parametrize("page", list(dict.fromkeys(ALL.values())))
def test_the_commands_of_a_page_run(page, world):
    failed = []
    for name, source in SAME.items():
        if (world / source).exists() and not (world / name).exists():
            shutil.copytree((world / source).resolve(), world / name)
    kind = "image" if page == "finetune_vlm_vsr" else "text"
    shutil.copy(world / f"{kind}_rows.jsonl", world / "rows.jsonl")
    for command in [one for one, first in ALL.items() if first == page and not reason(one)]:
        try:
            run(command, world)
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, "\n\n".join(failed)
    if page == "export":
        shutil.rmtree(world / "my_model")  # now that of the digits
    if page in [path.stem for path in EXAMPLES]:
        check_run_of_example(page, world)
    if page == "finetune_vlm_vsr":
        check_runs_of_vsr(world / "runs")


def test_each_exception_is_a_command_of_the_pages():
    assert {reason(command) for command in ALL} - {""} == set(CANNOT)


def check_run_of_example(name, world):
    """Find losses and a checkpoint of a training run, or the answers of another example."""
    made = world / read_options((ROOT / f"examples/{name}.yaml").read_text())[0]["output-dir"]
    if (made / "predictions.jsonl").exists():
        assert len((made / "predictions.jsonl").read_text().splitlines()) == 2
        assert (made / "report.json").exists() == (name == "evaluate_digits")
        return
    lines = map(json.loads, (made / "log.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 1 and all(map(math.isfinite, losses))
    assert list((made / "checkpoints").glob("step-*"))


def check_runs_of_vsr(runs):
    """Find adapters of only the language model, weights without the tower's, and a comparison."""
    adapter = next(runs.glob("vsr-lora/checkpoints/step-*/adapter_config.json")).parent
    names = [name for file in adapter.glob("*.safetensors") for name in load_file(file)]
    assert names and all("lora_" in name and "visual" not in name for name in names)
    assert list(runs.glob("vsr-full/checkpoints/best/model*.safetensors"))
    report = json.loads((runs / "vsr-lora/random/report.json").read_text())
    assert report["num_samples"] == 2 and "comparison" in report
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
