"""Talks with a model in the terminal; answers appear as they are made.

python chat.py --model-path my_model
python chat.py --server http://127.0.0.1:8000

A line is a message; one that ends with a backslash goes on, and so does a block of ```. /help
lists the commands, /exit or the end of the input ends. Ctrl-C stops an answer; at the prompt it
ends.
"""

import dataclasses
import functools
import signal
import sys
from typing import Any

import torch
import transformers

from answer_engines import build_model, plan_model
from answer_run import check_model_path
from options.answer_args import ChatArguments, parse_chat_args
from options.chat_options import ChatConfig
from options.fields import check_limits
from register import freeze_registers, import_shelf
from stageline.distributed.failure import run_entry
from stageline.distributed.stop import release_signals
from stageline.errors import INTERRUPTED, UserError
from stageline.inference.chat_session import ChatSession
from stageline.inference.dialogue import Dialogue
from stageline.inference.remote import Endpoint
from stageline.inference.remote_chat import RemoteChat, server_url
from stageline.inference.terminal import HELP, Terminal, note, read_message

SHELF = ("models", "prompt_fn")
SETTINGS = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty")


def main() -> int:
    """Talks until the input ends; returns the exit code."""
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_chat_args()
    freeze_registers()
    if not arguments.run.server:
        check_model_path(arguments.run.model_path, arguments.parts["builder"].part)
        if arguments.run.plan:
            return plan_model(arguments)
    chat = open_server(arguments.run) if arguments.run.server else open_session(arguments)
    release_signals()  # nothing is saved that a stop would have to wait for
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - lets input() edit a line

        note(HELP)
    terminal = Terminal(chat, change=functools.partial(changed, arguments.run))
    while True:
        try:
            message = read_message(input, prompt="> " if is_terminal else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            return INTERRUPTED
        if message and not terminal.respond(message):
            return 0


def open_session(arguments: ChatArguments) -> ChatSession:
    """Loads the model.

    Raises:
        UserError: the builder part loads none here.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, processor, _ = build_model(arguments)
    if processor is None or not isinstance(model, torch.nn.Module):
        raise UserError(
            f"--builder {arguments.parts['builder'].key} loads no model here. One with a tokenizer "
            "was expected, because its answers are shown token by token: use --builder auto."
        )
    torch.manual_seed(arguments.run.seed)
    render, image_token = (
        functools.partial(arguments.parts[name].part, **arguments.parts[name].kwargs)
        for name in ("prompt_fn", "image_token")
    )
    return ChatSession(
        model, processor, render=render, image_token=image_token, **settings_of(arguments.run)
    )


def open_server(run: ChatConfig) -> Dialogue:
    """Looks whether the server is there, and which model it has."""
    endpoint = Endpoint(
        name=run.server_model or "",
        base_url=server_url(run.server or ""),
        api_key_env=run.api_key_env,
        max_retries=1,  # a person waits
    )
    chat = RemoteChat(endpoint, seed=run.seed, **settings_of(run))
    note(f"{endpoint.name} at {endpoint.base_url}")
    return chat


def settings_of(run: ChatConfig) -> dict[str, Any]:
    """How answers are made."""
    return {name: getattr(run, name) for name in SETTINGS}


def changed(run: ChatConfig, settings: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """The settings with one of them changed.

    Raises:
        ValueError: there is none of this name, or the value is none for it.
    """
    if name not in settings:
        raise ValueError(f"no setting {name!r}; there are {', '.join(settings)}")
    value = type(settings[name])(text)
    check_limits(dataclasses.replace(run, **{name: value}))
    return {**settings, name: value}


if __name__ == "__main__":
    run_entry(main)
