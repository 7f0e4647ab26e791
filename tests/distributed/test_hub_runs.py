"""Runs with models of a hub by name: what each rank fetches, losses, resuming, evaluation."""

import json
from collections import Counter

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.helpers.hub_server import running_hub
from tests.helpers.small_run import GENERATE, Job, evaluated


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a tiny Llama of four layers in several files."""
    job = Job(tmp_path_factory.mktemp("job"), num_layers=4)
    whole = AutoModelForCausalLM.from_pretrained(job.model)
    (job.model / "model.safetensors").unlink()
    whole.save_pretrained(job.model, max_shard_size="8KB")
    return job


@pytest.fixture
def hub(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with running_hub() as hub:
        hub.answers_here(tmp_path / "home", monkeypatch)
        hub.commit = hub.add("org/tiny", job.model)
        yield hub


BREAK = "at=forward,rank=1,step=3,do=raise"  # the first checkpoint is of step 2


def train(job, name, *options, model="org/tiny", ranks=2, chaos=""):
    words = (job.folder / name, "--total-steps", 4, *options, "--model-path", model)
    return job.fork(*words, ranks=ranks, chaos=chaos, timeout=120)


def test_four_stages_fetch_each_file_once_and_train_as_from_a_folder(job, hub):
    local = train(job, "local", model=job.model, ranks=4)
    assert local.code == 0, local.err
    assert hub.asked() == []
    named = train(job, "named", ranks=4)
    assert named.code == 0, named.err
    assert job.losses(job.folder / "named") == job.losses(job.folder / "local") != {}
    index = json.loads((job.model / "model.safetensors.index.json").read_text())
    files = {path.name for path in job.model.iterdir()}
    # the ranks start at once, as under torchrun: none fetches what another one has
    assert Counter(hub.downloads()) == dict.fromkeys(files, 1)
    assert len(set(index["weight_map"].values())) >= 4
    saved = yaml.safe_load((job.folder / "named" / "config.yaml").read_text())
    assert saved["model-path"] == f"hub:org/tiny@{hub.commit}"
    hub.requests.clear()
    again = train(job, "again", model=saved["model-path"], ranks=2)
    assert again.code == 0, again.err
    assert hub.asked() == []  # a commit never changes


def test_a_run_goes_on_with_the_commit_that_it_began_with(job, hub, tmp_path):
    lora = ("--llm-lora-num", 1, "--parts.llm.frozen", "--parts.lm_head.frozen")
    whole = train(job, tmp_path / "whole", *lora)
    half = train(job, tmp_path / "half", *lora, "--sync-save", chaos=BREAK)
    assert whole.code == 0, whole.err
    assert half.code != 0 and len(job.checkpoints(tmp_path / "half")) == 1, half.err
    moved = {path.name: path.read_bytes() for path in job.model.iterdir()}
    other = json.loads(moved["config.json"]) | {"rms_norm_eps": 0.5}
    now = hub.add("org/tiny", {**moved, "config.json": json.dumps(other).encode()})
    resumed = train(job, tmp_path / "half", *lora, "--resume", "auto")
    assert resumed.code == 0, resumed.err
    assert job.losses(tmp_path / "half") == job.losses(tmp_path / "whole")
    saved = yaml.safe_load((tmp_path / "half" / "config.yaml").read_text())
    assert saved["model-path"] == f"hub:org/tiny@{hub.commit}"
    # a run that begins now takes what the branch has become
    fresh = train(job, tmp_path / "fresh", *lora)
    assert fresh.code == 0, fresh.err
    assert job.losses(tmp_path / "fresh") != job.losses(tmp_path / "whole")
    saved = yaml.safe_load((tmp_path / "fresh" / "config.yaml").read_text())
    assert saved["model-path"] == f"hub:org/tiny@{now}"
    # the adapter tells others which base it is of
    adapter = max((tmp_path / "half" / "checkpoints").glob("step-*"))
    told = json.loads((adapter / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["revision"]) == ("org/tiny", hub.commit)


def evaluate(job, folder, model, *options):
    words = ("--model-path", model, "--engine", "device_map", "--limit", 4, *options)
    found = evaluated(job, folder, *GENERATE, *words)
    return {key: record["prediction"] for key, record in found.items()}


def test_an_evaluation_and_its_adapter_by_name(job, hub, tmp_path):
    lora = "--llm-lora-num 1 --parts.llm.frozen --parts.lm_head.frozen --learning-rate 0.3".split()
    done = train(job, tmp_path / "run", *lora, model=job.model)
    assert done.code == 0, done.err
    adapter = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    hub.add("org/lora", adapter)
    hub.requests.clear()
    local = evaluate(job, tmp_path / "a", job.model, "--adapter-path", adapter)
    assert hub.asked() == []
    named = evaluate(job, tmp_path / "b", "org/tiny", "--adapter-path", "org/lora@main")
    assert named == local != evaluate(job, tmp_path / "c", "org/tiny")
    weights = hub.downloads(".*safetensors")
    assert len(weights) == len(set(weights)) > 4 and "adapter_model.safetensors" in weights
