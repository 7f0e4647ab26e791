"""Talk with a model in the terminal; answers appear token by token.

python chat.py --model-path my_model
python chat.py --server http://127.0.0.1:8000

A line is a message. A backslash at its end, or an open ``` block, continues it on the next line.
/help lists the commands. /exit or the end of the input quits. Ctrl-C stops an answer; at the
prompt it quits.
"""

import dataclasses
import functools
import signal
import sys
from typing import Any

from commands import quiet_transformers, start
from commands.stages import check_model_path, prepare_texts
from options.answer import ChatConfig, ChatSettings
from options.fields import check_limits, option_fields
from parse_args import parse_chat_args
from stageline.distributed.stop import release_signals
from stageline.errors import INTERRUPTED, UserError

SHELF = ("models", "prompt_fn")


def main() -> int:
    """Talk until the input ends; return the exit code."""
    config = start(parse_chat_args, *SHELF)
    run, parts = config.run, config.parts
    import transformers  # after the options: --help answers at once

    from commands.answer_run import build_model, plan_model
    from stageline.inference import dialogue
    from stageline.inference.remote import Endpoint
    from stageline.serving.client import Server, server_url

    engine: dialogue.LocalModel | Server
    if run.server:
        endpoint = Endpoint(
            name=run.server_model or "",
            base_url=server_url(run.server),
            api_key_env=run.api_key_env,
            max_retries=1,  # a person waits
        )
        engine = Server(endpoint)
        dialogue.note(f"{endpoint.name} at {endpoint.base_url}")
    else:
        check_model_path(run, parts["builder"].part)
        if run.plan:
            return plan_model(config)
        quiet_transformers()
        model, processor, _ = build_model(config)
        if processor is None or not isinstance(model, transformers.PreTrainedModel):
            raise UserError(
                f"--builder {parts['builder'].key} loads no model here. Use --builder auto."
            )
        prepare_texts(parts["prompt_fn"], processor, model)
        render, image_token = (parts[name].bound for name in ("prompt_fn", "image_token"))
        engine = dialogue.LocalModel(model, processor, render=render, image_token=image_token)

    answering = {name: getattr(run, name) for name in option_fields(ChatSettings)}
    talk = dialogue.Dialogue(
        engine,
        write=functools.partial(print, end="", flush=True),
        change=functools.partial(changed, run),
        **answering,
    )
    release_signals()  # nothing is saved, so a stop need not wait
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - lets input() edit a line

        dialogue.note(dialogue.HELP)
    while True:
        try:
            message = dialogue.read_message(input, prompt="> " if is_terminal else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            return INTERRUPTED
        if message and not talk.respond(message):
            return 0


def changed(run: ChatConfig, settings: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return the settings with one of them changed; ValueError: there is none, or a wrong value."""
    if name not in settings:
        raise ValueError(f"no setting {name!r}; there are {', '.join(settings)}")
    value = type(settings[name])(text)
    check_limits(dataclasses.replace(run, **{name: value}))
    return {**settings, name: value}
