"""lm_eval's own clients of OpenAI-style servers against our server, on tasks that generate."""

import os
import threading
from pathlib import Path

import pytest
import torch

from answer_stages import AnsweringModel
from register import image_token_register, import_shelf, prompt_fn_register
from stageline.data.processor import load_processor, save_processor
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder
from stageline.inference.decoding.stop_ids import stop_ids_of
from stageline.testing.tiny_checkpoints import tiny_whole
from stageline.testing.tiny_tokenizers import tiny_tokenizer

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # read when lm_eval is imported
    os.environ.setdefault(name, "1")
for package in ("fastapi", "uvicorn", "prometheus_client", "aiohttp", "tenacity"):
    pytest.importorskip(package)
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from stageline.testing.served import served  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tests" / "samples" / "lm_eval_tasks"
TASK = "commands_name"
POSITIONS = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer((TASKS / "commands.jsonl").read_text(encoding="utf-8").splitlines())
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    tiny_whole("llama", path, noise=0.3, **fields)
    save_processor(tokenizer, path)
    return path


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


def answers(model, manager, monkeypatch, **options):
    """Of each question, the prompt's hash and the answer."""
    monkeypatch.chdir(ROOT)  # the data files of the tasks are relative to it
    results = lm_eval.simple_evaluate(model, tasks=[TASK], task_manager=manager, **options)
    return {sample["doc_id"]: sample["resps"][0][0] for sample in results["samples"][TASK]}


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=str(TASKS), include_defaults=False)


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_the_answers_of_the_server_are_those_of_hf(url, folder, manager, monkeypatch, is_chat):
    model = "local-chat-completions" if is_chat else "local-completions"
    where = "chat/completions" if is_chat else "completions"
    arguments = {
        "base_url": f"{url}/v1/{where}",
        "model": "tiny",
        "num_concurrent": 4,
        "max_retries": 1,
    }
    if not is_chat:
        arguments |= {"tokenizer": str(folder), "tokenizer_backend": "huggingface"}
        arguments |= {"max_length": POSITIONS}
    options = {"apply_chat_template": is_chat, "num_fewshot": 1}
    found = answers(model, manager, monkeypatch, model_args=arguments, **options)
    reference = HFLM(str(folder), device="cpu", dtype="float32")
    expected = answers(reference, manager, monkeypatch, **options)
    assert found == expected
    assert len(set(expected.values())) > 3  # else equal texts would show little
