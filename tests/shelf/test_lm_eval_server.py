"""lm_eval's own clients of OpenAI-style servers against our server, and its `hf` model."""

import os
import re
import shlex
import threading
from pathlib import Path

import pytest
import torch

from commands.decode_run import AnsweringModel
from register import image_token_register, import_shelf, prompt_fn_register
from stageline.data.text.processor import load_processor
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder
from stageline.inference.generation import stop_ids_of
from tests.helpers.lm_eval_results import TASKS, assert_same_results, save_task_model

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # read when lm_eval is imported
    os.environ.setdefault(name, "1")
for package in ("fastapi", "uvicorn", "prometheus_client", "aiohttp", "tenacity"):
    pytest.importorskip(package)
lm_eval = pytest.importorskip("lm_eval")

from lm_eval._cli import HarnessCLI  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tests.helpers.served import served  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TASK = "commands_name"
SCORED = ["commands_choice", "descriptions"]  # the first scores choices, the second whole texts
POSITIONS = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_task_model(tmp_path_factory.mktemp("model"), max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module")
def url(folder):
    import_shelf("pp_models", "prompt_fn", "prompt")
    model = AnsweringModel(folder, 2, torch.float32)
    tokenizer = load_processor(folder)
    engine = DecodingEngine(
        LocalChain([StageDecoder(model.build(stage, "cpu")) for stage in range(2)]),
        tokenizer=tokenizer,
        limits=Limits(max_length=POSITIONS),
        stop_ids=stop_ids_of(model.base, model.config, tokenizer),
    )
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    parts = {
        "render": prompt_fn_register["chat"],
        "image_token": image_token_register["auto"],
    }
    with served(engine, **parts) as running:
        yield running.url
    engine.stop()
    thread.join(30)
    assert not thread.is_alive()


def evaluated(model, manager, monkeypatch, tasks, **options):
    monkeypatch.chdir(ROOT)  # the data files of the tasks are relative to it
    return lm_eval.simple_evaluate(
        model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options
    )


def answers(model, manager, monkeypatch, **options):
    """Return the prompt's hash and the answer of each question."""
    results = evaluated(model, manager, monkeypatch, [TASK], **options)
    return {sample["doc_id"]: sample["resps"][0][0] for sample in results["samples"][TASK]}


def completions(url, folder, **others):
    return {
        "base_url": f"{url}/v1/completions",
        "model": "tiny",
        "max_retries": 1,
        "tokenizer": str(folder),
        "tokenizer_backend": "huggingface",
        "max_length": POSITIONS,
        **others,
    }


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=str(TASKS), include_defaults=False)


def test_lm_eval_takes_the_commands_of_the_guide():
    text = (ROOT / "docs/lm_eval.md").read_text(encoding="utf-8")
    commands = re.findall(r"^lm_eval (run .*?)```", text, re.DOTALL | re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        told = HarnessCLI()._parser.parse_args(shlex.split(command.replace("\\\n", "")))
        named = told.model_args if isinstance(told.model_args, dict) else dict(told.model_args)

        class Client(get_model(told.model)):
            def __init__(self, **given):
                assert given["base_url"].startswith("http://127.0.0.1:8000/v1/")

        # simple_evaluate calls it like this; a name on both sides is a TypeError
        Client.create_from_arg_obj(
            named, {"batch_size": getattr(told, "batch_size", 1), "device": None}
        )


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_the_answers_of_the_server_are_those_of_hf(url, folder, manager, monkeypatch, is_chat):
    model = "local-chat-completions" if is_chat else "local-completions"
    arguments = completions(url, folder, num_concurrent=4)
    if is_chat:
        arguments["base_url"] = f"{url}/v1/chat/completions"
        for name in ("tokenizer", "tokenizer_backend", "max_length"):
            del arguments[name]
    options = {"apply_chat_template": is_chat, "num_fewshot": 1}
    found = answers(model, manager, monkeypatch, model_args=arguments, **options)
    reference = HFLM(str(folder), device="cpu", dtype="float32")
    expected = answers(reference, manager, monkeypatch, **options)
    assert found == expected
    assert len(set(expected.values())) > 3  # few different texts would show little


def test_the_scores_of_the_server_are_those_of_hf(url, folder, manager, monkeypatch):
    arguments = completions(url, folder, num_concurrent=4, batch_size=3)
    found = evaluated(
        "local-completions", manager, monkeypatch, SCORED, model_args=arguments, num_fewshot=1
    )
    reference = HFLM(str(folder), device="cpu", dtype="float32")
    expected = evaluated(reference, manager, monkeypatch, SCORED, num_fewshot=1)
    close = {"abs": 1e-3, "rel": 1e-6}
    assert_same_results(found, expected, SCORED, pair=close, whole=close)
