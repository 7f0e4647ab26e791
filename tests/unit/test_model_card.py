"""The model card states what is known of a run, and leaves out the rest."""

import hashlib
import json
import re
import shlex

import peft
import yaml
from transformers import AutoConfig

from commands import train as train_pp  # noqa: F401 - registers the engine that config.yaml names
from parse_args import parse_train_args
from register import import_shelf
from stageline.checkpoint.export_files import read_run_facts, short_path
from stageline.checkpoint.layout import FORMAT_VERSION, content_sum
from stageline.checkpoint.plain_folder import export_folder
from stageline.data.text.processor import save_processor
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_processor, tiny_tokenizer

OPTIONS = {
    "train-model": "llama",
    "dataset": "jsonl",
    "prompt": "question",
    "prompt-fn": "fill",
    "image-token": "none",
    "collate-fn": "sft",
    "loss-fn": "sft",
    "optimizer": "adamw",
    "lr-scheduler": "cosine",
    "engine": "pipeline",
    "model-path": "/home/someone/secret/models/tiny-llama",
    "dataset-path": "/home/someone/secret/data/rows.jsonl",
    "output-dir": "/home/someone/secret/runs/x",
    "learning-rate": 0.002,
    "lora.target": ["q_proj", "v_proj"],
    "llm-lora-num": 1,
    "config-path": None,
    "bf16": False,
    "optimizer.beta2": 0.95,
}


def record(kind, step, **figures):
    return {"kind": kind, "step": step, "time": 1.0, **figures}


LOG = [
    record("eval", 0, loss=5.5, token_accuracy=0.0, num_targets=4),
    record("train", 1, loss=5.0, learning_rate=0.1),
    record("train", 2, loss=4.0, learning_rate=0.1),
    record("eval", 2, loss=3.25, token_accuracy=0.5, num_targets=4),
    record("train", 3, loss=3.0, learning_rate=0.1),
    record("eval", 3, loss=3.5, token_accuracy=0.625, num_targets=4),
    record("train", 4, loss=0.125, learning_rate=0.1),  # beyond the checkpoint
]


def make_run(folder, *, step=3, best=False, curve=True):
    """Return a run folder with a checkpoint that is a plain model."""
    run = folder / "runs" / "x"
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    tiny_whole("llama", checkpoint)
    (run / "config.yaml").write_text("# a comment\n" + yaml.safe_dump(OPTIONS, sort_keys=False))
    lines = [json.dumps(item) for item in LOG]
    (run / "log.jsonl").write_text("\n".join([*lines, '{"kind": "tr']))
    if curve:
        (run / "loss.png").write_bytes(b"a picture")
    files = {
        path.name: {"size": path.stat().st_size, "sha256": digest(path)}
        for path in checkpoint.iterdir()
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "kind": "full",
        "step": step,
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "files": files,
    }
    if best:
        manifest["best"] = {"metric": "loss", "step": step, "figures": {"loss": 3.5}}
    manifest["sha256"] = content_sum(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_the_card_of_a_run(tmp_path):
    export_folder(make_run(tmp_path, best=True), tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    assert front_matter(text) == {
        "base_model": "models/tiny-llama",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["stageline", "llama"],
        "datasets": ["data/rows.jsonl"],
    }
    assert "train_pp.py --train-model llama" in text
    assert "--learning-rate 0.002" in text
    assert "--optimizer.beta2 0.95" in text
    assert "saved after 3 optimizer steps" in text
    assert "| last training step | 3 | 3 |  |" in text
    assert "| last evaluation | 3 | 3.5 | 0.625 |" in text
    assert "| lowest evaluation loss | 2 | 3.25 | 0.5 |" in text
    assert "weights of the best loss" in text
    assert "![Loss of the run](loss.png)" in text
    assert (tmp_path / "mine" / "loss.png").read_bytes() == b"a picture"
    assert "torch 2.13.0" in text
    assert "0.125" not in text  # this loss is from a step after the checkpoint


def test_no_path_tells_more_than_its_last_two_parts(tmp_path):
    export_folder(make_run(tmp_path), tmp_path / "mine")
    for path in (tmp_path / "mine").rglob("*"):
        content = path.read_bytes()
        assert b"secret" not in content, path
        assert str(tmp_path).encode() not in content, path
    assert short_path("/home/a/b/c/") == "b/c"
    assert short_path("c.jsonl") == "c.jsonl"
    assert short_path("/c") == "c"


def test_the_command_is_that_of_the_run(tmp_path, monkeypatch):
    """Parsed again it gives the options that were written down."""
    import_shelf()
    monkeypatch.chdir(tmp_path)
    for path in ("models/tiny-llama", "data/rows.jsonl"):  # the card shortens longer paths to these
        (tmp_path / path).mkdir(parents=True)
    command = read_run_facts(make_run(tmp_path)).command()
    assert command.startswith("python train_pp.py --train-model llama")
    run = parse_train_args(shlex.split(command)[2:]).run
    assert run.learning_rate == 0.002
    assert run.lora.target == ["q_proj", "v_proj"]
    assert run.dataset_path.endswith("data/rows.jsonl")
    assert run.bf16 is False


def test_the_code_in_the_card_loads_the_model(tmp_path, monkeypatch):
    checkpoint = make_run(tmp_path)
    tiny_tokenizer().save_pretrained(checkpoint)
    monkeypatch.chdir(tmp_path)
    for kind, where in (("llama", "mine"), ("llava", "seeing")):
        source = checkpoint
        if kind == "llava":
            source = tmp_path / "llava"
            tiny_whole("llava", source)
            save_processor(tiny_processor("llava"), source)
        export_folder(source, tmp_path / where)
        text = (tmp_path / where / "README.md").read_text()
        code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
        names = {}
        exec(compile(code, "card", "exec"), names)
        expected = AutoConfig.from_pretrained(where).architectures[0]
        assert type(names["model"]).__name__ == expected


def test_the_code_in_the_card_of_an_adapter_loads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tiny_whole("llama", tmp_path / "models" / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "models" / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "run")
    base.name_or_path = str(tmp_path / "models" / "tiny")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    facts = front_matter(text)
    assert (facts["library_name"], facts["base_model"]) == ("peft", "models/tiny")
    assert "lora" in facts["tags"]
    names = {}
    exec(compile(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], "card", "exec"), names)
    assert isinstance(names["model"], peft.PeftModel)
