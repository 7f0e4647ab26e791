"""lm_eval's tasks through stages that answer together, against its own `hf` model."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

from commands.decode_run import AnsweringModel
from commands.lm_eval import find_tasks
from register import import_shelf
from stageline.data.text.processor import load_processor
from stageline.errors import UserError
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder
from stageline.inference.generation import stop_ids_of
from tests.helpers.lm_eval_results import TASKS, assert_same_results, save_task_model

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # read when lm_eval is imported
    os.environ.setdefault(name, "1")
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402

from stageline.evaluation.lm_eval import StagelineLM  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["commands_choice", "commands_name", "descriptions"]


@pytest.fixture(scope="module", autouse=True)
def shelf():
    import_shelf("pp_models")


@pytest.fixture(scope="module")
def manager():
    return find_tasks(NAMES, include_path=str(TASKS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """gpt2 has no place for a token behind its last position."""
    return save_task_model(tmp_path_factory.mktemp("gpt2"), "gpt2", n_positions=96)


def open_engine(folder, num_stages):
    model = AnsweringModel(Path(folder), num_stages, torch.float32)
    stages = [StageDecoder(model.build(stage, "cpu")) for stage in range(num_stages)]
    tokenizer = load_processor(folder)
    return DecodingEngine(
        LocalChain(stages),
        tokenizer=tokenizer,
        limits=Limits(
            max_length=model.config.max_position_embeddings,
            num_groups=num_stages,
        ),
        stop_ids=stop_ids_of(model.base, model.config, tokenizer),
    )


@pytest.fixture(scope="module")
def expected(folder, manager):
    lm = HFLM(str(folder), device="cpu", dtype="float32")
    with contextlib.chdir(ROOT):  # the data files of the tasks are relative to it
        return lm_eval.simple_evaluate(lm, tasks=NAMES, task_manager=manager, bootstrap_iters=0)


@pytest.mark.parametrize("num_stages", [4])
def test_same_figures_and_answers_as_hf(folder, expected, manager, num_stages, monkeypatch):
    monkeypatch.chdir(ROOT)  # the data files of the tasks are relative to it
    engine = open_engine(folder, num_stages)
    found = lm_eval.simple_evaluate(StagelineLM(engine), tasks=NAMES, task_manager=manager)
    close = {"abs": 1e-4}
    assert_same_results(found, expected, NAMES, pair=close, whole=close | {"rel": 1e-6})
    texts = {sample["resps"][0][0] for sample in expected["samples"]["commands_name"]}
    assert len(texts) > 3  # few different texts would show little


def test_an_unknown_task_is_named(monkeypatch):
    manager = lm_eval.tasks.TaskManager

    def own(*, include_path, include_defaults):
        """Leave out lm_eval's own tasks, which are thousands of files."""
        return manager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    with pytest.raises(UserError, match="has no task no_such_task.*--lm-eval.include_path"):
        find_tasks(["commands_choice", "no_such_task"], include_path=str(TASKS))
