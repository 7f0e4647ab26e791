"""The conversation of chat.py: equal to plain transformers, and a user's text stays text."""

import functools
import sys

import pytest
import torch

from register import import_shelf, prompt_fn_register
from stageline.errors import UserError
from stageline.inference.dialogue import Dialogue, LocalModel
from tests.helpers.small_run import ForkedRun, Job
from tests.helpers.tiny_checkpoints import auto_class
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

import_shelf("prompt_fn")
END = 4  # <|im_end|>


def make_session(*, max_new_tokens=8, write=str, **config):
    torch.manual_seed(5)
    tokenizer = tiny_tokenizer(eos_token="<|im_end|>")
    config = {"max_position_embeddings": 1024, **config}
    config = tiny_config("llama", vocab_size=len(tokenizer), **config)
    model = auto_class("llama").from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than a fresh start
            parameter.mul_(1.5)
    return Dialogue(
        LocalModel(model, tokenizer, render=functools.partial(prompt_fn_register["chat"])),
        write=write,
        change=dict,
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        repetition_penalty=1.0,
    )


def by_the_library(session, messages):
    ids = session.engine.processor.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    made = session.engine.model.generate(
        ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=[2, END]
    )
    return session.engine.processor.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_answers_and_history_equal_the_librarys():
    pieces: list[str] = []
    session = make_session(write=pieces.append)
    messages = [{"role": "system", "content": "You are a cat."}]
    session.system("You are a cat.")
    for text in ("Which digit?", "true or false", "no"):
        pieces.clear()
        messages.append({"role": "user", "content": text})
        wanted = by_the_library(session, messages)
        answer, num_dropped = session.answer(text)
        assert answer == "".join(pieces) == wanted
        assert num_dropped == 0 and len(pieces) > 1, "as they are made"
        messages.append({"role": "assistant", "content": answer})
    session.new()
    one = [messages[0], {"role": "user", "content": "no"}]
    assert session.answer("no")[0] == by_the_library(session, one)


def test_the_oldest_messages_go_when_there_is_no_room():
    session = make_session(max_position_embeddings=96)
    dropped = []
    for number in range(6):
        dropped.append(session.answer(f"Which number is {number}?")[1])
        length = session.engine.encode(session.messages)["input_ids"].shape[1]
        assert length <= 96 + 12, "the next prompt begins where this one ends"
    assert dropped[0] == 0 and 2 in dropped
    assert session.messages[-2]["content"] == "Which number is 5?"
    kept = list(session.messages)
    with pytest.raises(UserError, match="tokens long.*reads 96"):
        session.answer("x" * 200)
    assert session.messages == kept


def test_ctrl_c_keeps_what_was_written():
    written: list[str] = []

    def write(text):
        written.append(text)
        if len(written) == 1:
            raise KeyboardInterrupt

    session = make_session(write=write)
    answer, _ = session.answer("Which digit?")
    assert answer == "".join(written) != ""
    assert answer != by_the_library(session, [{"role": "user", "content": "Which digit?"}])
    assert session.messages[-1] == {"role": "assistant", "content": answer}


def test_a_conversation_through_the_entry_file(tmp_path, monkeypatch):
    job = Job(tmp_path, num_rows=1)
    lines = "Which?\n\n/what\n/system true\nWhich?\n/new\nWhich?\n" + "x" * 300 + "\n/exit\nnot\n"
    (tmp_path / "lines.txt").write_text(lines)
    words = (
        "-m",
        "stageline",
        "chat",
        "--model-path",
        job.model,
        "--max-new-tokens",
        5,
        "--device",
        "cpu",
    )
    with (tmp_path / "lines.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        done = ForkedRun([str(word) for word in words], ranks=1).wait(200)
    assert done.code == 0, done.err
    answers = done.out.split("\n")[:-1]
    assert "(no command /what." in done.err and done.err.count("(a new conversation)") == 2
    assert "tokens long; with" in done.err
    assert len(answers) == 3, "one a message"
    assert answers[1] == answers[2] != "", "/new keeps the system message"
