"""Faults in model folders: code of their own, pickles, templates, broken settings, hub names."""

import pickle
import shutil
import socket
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import models
from commands import train as train_pp  # noqa: F401  now: what a test registers goes after it
from pp_models import CausalLMStage
from stageline.checkpoint.load import load_split_model
from stageline.checkpoint.plain_folder import load_plain
from stageline.data.text.chat import render_chat
from stageline.data.text.messages import Turn
from stageline.data.text.processor import load_processor
from stageline.data.text.rendered import Piece
from stageline.errors import UserError
from stageline.model_folder import load_config
from tests.helpers.faulty_files import Canary, edit, refused
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    tiny_whole("llama", folder, max_shard_size="30KB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


@pytest.fixture
def no_questions(monkeypatch):
    """Fail if the terminal asks a question."""

    def asked(prompt=""):
        raise AssertionError(f"asked on the terminal: {prompt}")

    monkeypatch.setattr("builtins.input", asked)


@pytest.fixture
def canary(folder, monkeypatch, tmp_path):
    """Return a path that exists once the code of the model folder has run."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    path = tmp_path / "canary"
    code = f"import os\nos.makedirs({str(path)!r}, exist_ok=True)\n"
    code += "from transformers import PretrainedConfig\n"
    code += "class Config(PretrainedConfig):\n    model_type = 'canary'\n"
    (folder / "canary.py").write_text(code)
    return path


def everything(folder):
    """Return all ways by which a model folder is read."""
    config = AutoConfig.for_model("llama")
    paths = {"config_path": str(folder), "processor_path": None, "checkpoint_path": str(folder)}
    return {
        "config": lambda: load_config(folder),
        "processor": lambda: load_processor(folder),
        "builder": lambda: models.builders.auto(str(folder), device="cpu"),
        "export": lambda: load_plain(folder),
        "stage": lambda: CausalLMStage.build(**paths, stage=0, num_stages=2),
        "weights": lambda: load_split_model(
            CausalLMStage(config, stage=0, num_stages=2), folder, device="cpu", dtype=torch.float32
        ),
    }


# -- code ----------------------------------------------------------------------------------------


WAYS = ["config", "processor", "builder", "export", "stage"]


@pytest.mark.parametrize("way", WAYS)
def test_i01_code_of_a_model_runs_by_the_flag_alone(way, folder, canary, no_questions):
    named = {"model_type": "canary", "auto_map": {"AutoConfig": "canary.Config"}}
    file = folder / "config.json"
    edit(file, lambda config: config.update(named))
    refused(everything(folder)[way], file, "canary.Config", "--trust-remote", code=2)
    assert not canary.exists()
    assert type(load_config(folder, trust_remote_code=True)).__name__ == "Config"
    assert canary.exists(), "it would have shown"


CODE_IN = {
    "a sub-config": ("config.json", {"text_config": {"auto_map": {"AutoConfig": "canary.C"}}}),
    "the tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["canary.C", None]}}),
    "a part of it": (
        "processor_config.json",
        {"image_processor": {"auto_map": {"AutoImageProcessor": "canary.C"}}},
    ),
    "a kernel": ("config.json", {"attn_implementation": "canary.C/kernels"}),
}


@pytest.mark.parametrize("place", CODE_IN)
def test_i02_code_named_elsewhere_runs_by_the_flag_alone(place, folder, canary, no_questions):
    name, content = CODE_IN[place]
    edit(folder / name, lambda settings: settings.update(content))
    for way in WAYS:
        refused(everything(folder)[way], folder / name, "canary.C", code=2)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a.pt"])
def test_i03_pickles_are_refused_with_the_way_to_convert_them(name, folder, tmp_path):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    for way in ("weights", "stage", "builder", "export"):
        refused(everything(folder)[way], folder, name, "save_pretrained", "is never opened")
    assert not (tmp_path / "canary").exists()


def test_i04_a_template_that_breaks_out_is_refused(tmp_path):
    canary = tmp_path / "canary"
    code = f"{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}"
    turns = [Turn("user", (Piece("q", is_user=True),)), Turn("assistant", (Piece("a"),), True)]
    tokenizer = tiny_tokenizer(chat_template=code)
    refused(lambda: render_chat(turns, tokenizer), "chat template", "SecurityError", code=2)
    assert not canary.exists()


# -- files ---------------------------------------------------------------------------------------


BROKEN = {
    "config.json": WAYS,
    "generation_config.json": WAYS,
    "tokenizer_config.json": ["processor", "stage", "builder"],
    "tokenizer.json": ["processor", "stage", "builder"],
    "preprocessor_config.json": ["processor", "builder"],
    "model.safetensors.index.json": ["weights", "stage", "builder", "export"],
}


@pytest.mark.parametrize("name", BROKEN)
def test_i05_a_broken_file_is_named(name, folder):
    (folder / name).write_bytes(b'{"a": 1')
    for way in BROKEN[name]:
        refused(everything(folder)[way], folder / name)


@pytest.mark.parametrize("way", ["builder", "export", "stage"])
@pytest.mark.parametrize(
    "values",
    [{"hidden_act": "sluu"}, {"quantization_config": {"quant_method": "hqq"}}],
    ids=["activation", "hqq"],
)
def test_i05_a_config_of_which_no_model_is_built_is_no_crash(values, way, folder):
    edit(folder / "config.json", lambda config: config.update(values))
    with pytest.raises(UserError, match="sluu|hqq|HQQ"):
        everything(folder)[way]()


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "/no/such/folder"])
def test_i06_a_name_on_the_hub_is_refused_without_looking_there(name, monkeypatch):
    calls = []

    def called(*arguments, **options):
        calls.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", called)
    monkeypatch.setattr(socket.socket, "connect", called)
    for way, load in everything(name).items():
        if way != "export":  # takes a Path that find_checkpoint has looked at
            refused(load, name, "this machine", code=2)
    assert calls == []
