"""Talks with a model in the terminal; answers appear as they are made.

python chat.py --model-path my_model

A line is a message. /new forgets the conversation, /system TEXT sets the system message (and
starts anew), /exit or the end of the input ends. Ctrl-C stops an answer; at the prompt it ends.
"""

import functools
import signal
import sys

import torch
import transformers

from answer_engines import build_model, plan_model
from answer_run import check_model_path
from options.answer_args import ChatArguments, parse_chat_args
from register import freeze_registers, import_shelf
from stageline.distributed.failure import run_entry
from stageline.distributed.stop import release_signals
from stageline.errors import INTERRUPTED, DataError, UserError
from stageline.inference.chat_session import ChatSession

SHELF = ("models", "prompt_fn")
HELP = "/new: forget the conversation; /system TEXT: the system message; /exit: end"


def main() -> int:
    """Talks until the input ends; returns the exit code."""
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_chat_args()
    freeze_registers()
    check_model_path(arguments.run.model_path, arguments.parts["builder"].part)
    if arguments.run.plan:
        return plan_model(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    session = open_session(arguments)
    release_signals()  # nothing is saved that a stop would have to wait for
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - lets input() edit a line

        print(HELP)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            return INTERRUPTED
        if line.strip() == "/exit":
            return 0
        if line.strip():
            respond(session, line.strip())


def open_session(arguments: ChatArguments) -> ChatSession:
    """Loads the model.

    Raises:
        UserError: the builder part loads none here.
    """
    run, prompt_fn = arguments.run, arguments.parts["prompt_fn"]
    model, processor, _ = build_model(arguments)
    if processor is None or not isinstance(model, torch.nn.Module):
        raise UserError(
            f"--builder {arguments.parts['builder'].key} loads no model here. One with a tokenizer "
            "was expected, because its answers are shown token by token: use --builder auto."
        )
    torch.manual_seed(run.seed)
    return ChatSession(
        model,
        processor,
        render=functools.partial(prompt_fn.part, **prompt_fn.kwargs),
        max_new_tokens=run.max_new_tokens,
        temperature=run.temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        repetition_penalty=run.repetition_penalty,
    )


def respond(session: ChatSession, line: str) -> None:
    """Carries out a command, or prints the model's answer."""
    word, _, rest = line.partition(" ")
    if word in ("/new", "/system"):
        session.start_anew()
        if word == "/system":
            session.system = rest.strip() or None
        print("(a new conversation)", file=sys.stderr)
    elif word.startswith("/") and word[1:].isalpha():
        print(f"(no command {word}. {HELP})", file=sys.stderr)
    else:
        try:
            _, num_dropped = session.answer(
                line, write=functools.partial(print, end="", flush=True)
            )
        except (UserError, DataError) as error:  # the next message may be right
            print(f"error[{error.kind}]: {error}", file=sys.stderr)
            return
        print(flush=True)
        if num_dropped:
            print(f"(forgot the {num_dropped} oldest messages: no room)", file=sys.stderr)


if __name__ == "__main__":
    run_entry(main)
