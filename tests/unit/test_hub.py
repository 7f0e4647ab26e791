"""Names on a hub: which names are valid, what is fetched for them, and the errors."""

import json
import os
import sys

import datasets
import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file

from commands import with_commit, with_folders
from options.answer import ChatConfig, InferConfig
from options.fields import OptionError, absolute, check_limits, option_fields, value_of
from options.train import RunConfig
from pp_models import CausalLMStage
from stageline.checkpoint.adapter import find_base
from stageline.checkpoint.files import weight_files, weights_fingerprint
from stageline.checkpoint.load import load_split_model
from stageline.data.rows.sets import OneSet, chosen_sets
from stageline.errors import CheckpointError, UserError
from stageline.hub import (
    FETCHED,
    HubName,
    fetch_missing,
    local_folder,
    name_of,
    pinned_set,
    read_name,
)
from stageline.model_folder import load_config
from tests.helpers.hub_server import TOKEN, running_hub
from tests.helpers.tiny_checkpoints import tiny_whole

SMALL = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}", "additional/x.jinja": b"{{ x }}"}
FILES = {
    **SMALL,
    "model.safetensors": bytes(range(256)) * 400,
    "pytorch_model.bin": b"\x80 a pickle",
    "onnx/config.json": b"{}",
    "README.md": b"",
}


@pytest.fixture
def hub():
    with running_hub() as found:
        yield found


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    """Return a hub that this process asks, with an empty cache."""
    monkeypatch.chdir(tmp_path)
    hub.answers_here(tmp_path / "home", monkeypatch)
    return hub


def refused(call, *words, kind=UserError):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.exit_code == (4 if kind is CheckpointError else 2)
    for word in words:
        assert word in str(caught.value), str(caught.value)


# -- names -------------------------------------------------------------------------------------


def test_what_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert read_name("org/model") == HubName("org/model")
    assert read_name("org/model@v1.0") == HubName("org/model", "v1.0")
    assert read_name("org/model@refs/pr/1") == HubName("org/model", "refs/pr/1")
    assert read_name("hub:runs/model") == HubName("runs/model")
    paths = ["/org/model", "./org/model", "../model", "~/model", "model", "a/b/c", "runs/model", ""]
    for path in [*paths, "sets/rows.jsonl", "org/model.safetensors"]:
        assert read_name(path) is None, path
    assert read_name("runs/model", folder=tmp_path / "runs") == HubName("runs/model")


def test_options_take_names_and_say_what_a_path_was_taken_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("org/model@main", "hub:runs/model"):
        check_limits(RunConfig(model_path=name, adapter_path=[name], dataset_path=name))
        check_limits(ChatConfig(model_path=name))
        assert absolute(option_fields(RunConfig)["model_path"], name) == name
    with pytest.raises(OptionError, match="runs/modle: there is no such file"):
        check_limits(RunConfig(model_path="runs/modle"))
    with pytest.raises(OptionError, match="no such file or folder") as caught:
        check_limits(RunConfig(dataset_path="sets/rows.jsonl"))
    assert "hub:" not in str(caught.value).split("relative to")[1]


# -- what is fetched ---------------------------------------------------------------------------


def test_small_files_come_at_once_and_weights_when_they_are_opened(here, tmp_path, capfd):
    commit = here.add("org/model", FILES)
    folder = local_folder("org/model")
    assert sorted(here.downloads()) == sorted(SMALL)
    assert name_of(folder) == HubName("org/model", commit) and folder.is_relative_to(tmp_path)
    assert (folder / "config.json").read_bytes() == SMALL["config.json"]
    assert f"org/model is {folder}" in capfd.readouterr().err
    for _ in range(2):
        fetch_missing(folder / "model.safetensors")
    assert here.downloads(".*(bin|safetensors)") == ["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    fetch_missing(folder / "other.safetensors")
    assert not (folder / "other.safetensors").exists()
    # a process that this one starts is told
    here.requests.clear()
    assert local_folder("org/model") == folder and here.requests == []


def test_a_branch_a_tag_and_a_commit(here):
    old = here.add("org/model", FILES, branch="v1")
    new = here.add("org/model", {**FILES, "config.json": b"{}"})
    assert name_of(local_folder("org/model")).revision == new
    assert name_of(local_folder("org/model@v1")).revision == old
    assert name_of(local_folder(f"org/model@{old}")).revision == old


@pytest.mark.parametrize(
    ("config", "given", "wanted"),
    [
        ({"dtype": "bfloat16"}, {"fp16": True}, "bf16"),
        ({"torch_dtype": "float16"}, {"bf16": True}, "fp16"),
        ({"dtype": "float32"}, {"bf16": True}, "fp32"),
        ({"text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "float16"}}, {}, "bf16"),
        ({}, {"bf16": True}, "bf16"),
        ({}, {"fp16": True}, "fp16"),
        ({}, {}, "fp32"),
    ],
)
def test_dtype_auto_is_that_of_the_config_first(config, given, wanted, tmp_path):
    kind = RunConfig if given else InferConfig
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = with_folders(kind(model_path=str(tmp_path), dtype="auto", **given))
    assert run.precision == wanted and run.dtype is None
    assert (
        with_folders(kind(model_path=str(tmp_path), **given)).precision == kind(**given).precision
    )
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    facts = {"peft_type": "LORA", "r": 1, "base_model_name_or_path": str(tmp_path)}
    (adapter / "adapter_config.json").write_text(json.dumps(facts))
    assert with_folders(kind(model_path=str(adapter), dtype="auto", **given)).precision == wanted


def test_a_dtype_that_no_run_computes_in_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"dtype": "float64"}')
    with pytest.raises(UserError, match="--dtype auto found float64"):
        with_folders(RunConfig(model_path=str(tmp_path), dtype="auto"))


def test_the_config_has_the_commit_and_a_resumed_run_takes_it(here, tmp_path, monkeypatch):
    old = here.add("org/model", FILES)
    rows = here.add("org/rows", {"train.jsonl": b"{}\n"}, kind="datasets")
    run = with_folders(RunConfig(model_path="org/model", dataset_path="org/rows"))
    saved = {
        name.replace("_", "-"): absolute(item, value_of(run, name))
        for name, item in option_fields(run).items()
    }
    assert saved["model-path"] == f"hub:org/model@{old}"
    assert saved["dataset-path"] == f"hub:org/rows@{rows}"
    monkeypatch.delenv(FETCHED)
    new = here.add("org/model", {**FILES, "config.json": b"{}"})
    again = RunConfig(model_path="org/model@main", adapter_path=["org/other"])
    here.add("org/other", FILES)
    assert name_of(with_folders(again).model_path).revision == new
    assert name_of(with_folders(again, recorded=saved).model_path).revision == old
    assert name_of(with_folders(again, recorded=saved).adapter_path[0]).repo == "org/other"
    assert with_commit(f"org/model@{new}", [f"hub:org/model@{old}"]) == f"org/model@{new}"
    assert with_commit("org/model2", [f"hub:org/model@{old}"]) == "org/model2"
    # a folder of another cache is a folder
    item = option_fields(run)["model_path"]
    other = tmp_path / "x" / "models--org--model" / "snapshots" / old
    assert absolute(item, str(other)) == str(other)


@pytest.mark.parametrize(("family", "stage"), [("llama", 0), ("mixtral", 1), ("llama", 3)])
def test_a_stage_fetches_the_files_of_its_tensors(here, tmp_path, stage, family):
    whole = tiny_whole(family, tmp_path / "model", max_shard_size="6KB")
    here.add("org/tiny", tmp_path / "model")
    folder = local_folder("org/tiny")
    config = transformers.AutoConfig.from_pretrained(folder)
    model = CausalLMStage(config, stage=stage, num_stages=4, dtype=torch.float32)
    load_split_model(model, folder, device="cpu", dtype=torch.float32)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    places = [f"model.layers.{stage}."]  # four layers
    places += [["model.embed_tokens"], [], [], ["model.norm", "lm_head"]][stage]
    wanted = {file for name, file in index.items() if name.startswith(tuple(places))}
    assert sorted(here.downloads(".*safetensors")) == sorted(wanted) != sorted({*index.values()})
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])
    assert weights_fingerprint(folder) == str(name_of(folder))
    # a caller that needs all of it gets the rest
    weight_files(folder)
    assert sorted(here.downloads(".*safetensors")) == sorted({*index.values()})


def test_integers_are_refused_in_a_file_that_came_late(here, tmp_path):
    whole = tiny_whole("llama", tmp_path / "model", max_shard_size="6KB")
    file = next(
        file
        for file in sorted((tmp_path / "model").glob("*.safetensors"))
        if "model.layers.0.mlp.up_proj.weight" in safe_open(file, "pt").keys()  # noqa: SIM118
    )
    from safetensors.torch import save_file

    save_file({name: value.to(torch.int8) for name, value in load_file(file).items()}, file)
    here.add("org/tiny", tmp_path / "model")
    model = CausalLMStage(whole.config, stage=0, num_stages=4, dtype=torch.float32)
    folder = local_folder("org/tiny")
    load = lambda: load_split_model(model, folder, device="cpu", dtype=torch.float32)  # noqa: E731
    refused(load, "as integers", kind=CheckpointError)


def test_weights_as_pickle_alone_are_not_fetched(here):
    here.add("org/old", {name: FILES[name] for name in ("config.json", "pytorch_model.bin")})
    folder = local_folder("org/old")
    refused(lambda: weight_files(folder), "org/old@", "pickles", "refs/pr/1", kind=CheckpointError)
    assert here.downloads(".*bin") == []


def test_the_base_of_an_adapter_by_name(here, tmp_path):
    old = here.add("org/base", FILES)
    here.add("org/base", {**FILES, "config.json": b"{}"})
    told = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "revision": old}
    config = json.dumps(told).encode()
    here.add("org/lora", {"adapter_config.json": config, "adapter_model.safetensors": b"x" * 99})
    adapter = local_folder("org/lora")
    assert (adapter / "adapter_model.safetensors").exists()
    (tmp_path / "org").mkdir()  # a folder of the owner's name
    assert name_of(find_base(adapter)).revision == old
    (tmp_path / "org").rmdir()
    here.repos.clear()
    os.environ.pop(FETCHED)
    (tmp_path / "a").mkdir()
    told["base_model_name_or_path"] = "org/gone"
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(told))
    refused(lambda: find_base(tmp_path / "a"), "org/gone", "Check", kind=CheckpointError)


def test_a_set_of_a_register_by_name(here, tmp_path, monkeypatch):
    for name, value in (("HF_ENDPOINT", here.url), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(datasets.config, name, value)
    rows = [{"instruction": f"{i}?", "input": "", "output": f"{i}!"} for i in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    old = here.add("org/rows", {"train.jsonl": lines}, kind="datasets")
    here.add("org/rows", {"train.jsonl": lines * 2}, kind="datasets")
    assert pinned_set("org/rows").startswith("hub:org/rows@")
    register = {"mine": {"file_name": f"org/rows@{old}", "formatting": "alpaca"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(register))
    (info,) = chosen_sets(tmp_path, ["mine"])
    one = OneSet(info, cache=str(tmp_path / "cache"))
    assert len(one) == 4 and one[1][1]["group"] == "mine" and "1!" in json.dumps(one[1][1])
    assert {one.path.split("/")[5] for one in here.requests if "/resolve/" in one.path} == {old}


def test_a_model_with_code_of_its_own_is_named_with_its_twin(here):
    config = {"model_type": "internvl_chat", "auto_map": {"AutoModel": "m.InternVLChatModel"}}
    here.add("org/InternVL", {"config.json": json.dumps(config).encode()})
    folder = local_folder("org/InternVL")
    refused(lambda: load_config(folder), "Take org/InternVL-hf", "convert_internvl.py")


# -- what goes wrong ---------------------------------------------------------------------------


def test_what_a_hub_refuses(here, tmp_path, monkeypatch):
    here.add("org/secret", FILES, is_private=True)
    here.add("org/gated", FILES, is_gated=True)
    here.add("org/model", FILES)
    here.add("org/rows", {"a.jsonl": b"{}"}, kind="datasets")
    cure = "hf auth login"
    for name in ("org/secret", "org/nothing"):
        refused(lambda name=name: local_folder(name), name, cure, str(tmp_path / name), "HF_TOKEN")
    refused(lambda: local_folder("org/gated"), "org/gated", "Ask on", cure)
    refused(lambda: local_folder("org/model@v9"), "no revision v9", "branch")
    refused(lambda: local_folder("org/a--b"), "owner/name[@revision]")
    refused(lambda: pinned_set("org/model"), "datasets", cure)
    refused(lambda: pinned_set("org/rows@v9"), "no revision v9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("org/secret", "org/gated"):
        fetch_missing(local_folder(name) / "model.safetensors")
    assert here.downloads("model.*") == ["model.safetensors"] * 2


def test_without_a_network(here, monkeypatch):
    here.add("org/model", FILES)
    folder = local_folder("org/model")
    monkeypatch.delenv(FETCHED)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    here.requests.clear()
    assert local_folder("org/model") == folder
    monkeypatch.delenv(FETCHED)
    for call in (
        lambda: local_folder("org/other"),
        lambda: fetch_missing(folder / "model.safetensors"),
    ):
        refused(call, "HF_HUB_OFFLINE is set", "hf download org/")
    assert pinned_set("org/rows@v1") == "hub:org/rows@v1"  # it may be in the cache of `datasets`
    assert here.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # no server listens on this port
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert local_folder("org/model") == folder
    refused(lambda: local_folder("org/other"), "Look at the network", "HF_ENDPOINT")


MODELSCOPE = """
import json, pathlib
def snapshot_download(model_id, *, revision=None, allow_patterns=None, ignore_patterns=None):
    folder = pathlib.Path("scope", model_id).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    told = [model_id, revision, allow_patterns, ignore_patterns]
    (folder / "told.json").write_text(json.dumps(told))
    return str(folder)
"""


def test_modelscope_if_it_is_asked_for(here, tmp_path, monkeypatch):
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    refused(lambda: local_folder("org/model"), "pip install modelscope")
    (tmp_path / "modelscope.py").write_text(MODELSCOPE)
    monkeypatch.syspath_prepend(tmp_path)
    folder = local_folder("org/model@v1")
    monkeypatch.delitem(sys.modules, "modelscope")
    name, revision, allowed, _ = json.loads((folder / "told.json").read_text())
    assert (name, revision) == ("org/model", "v1") and here.requests == []
    assert "model*.safetensors" in allowed and not any("bin" in one for one in allowed)
