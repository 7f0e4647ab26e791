"""The options of infer.py and chat.py -> their run configs and the kwargs of each chosen part."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from options.chat_options import ChatConfig
from options.chat_server_options import check_server
from options.checks import check_precision
from options.command_line import by_name, read_words
from options.engine_options import check_engine, with_engine_keys
from options.fields import check_limits
from options.image_options import check_images
from options.infer_options import InferConfig, check_prompts
from options.placement_options import check_placement
from parse_args import Arguments, read_arguments, with_configs

# register -> key that is taken when none is given; as in parse_args.py
INFER_KEYS: dict[str, str | None] = {
    "model": "generate",
    "builder": "auto",
    "prompt": "chat",
    "prompt_fn": "chat",
    "image_token": "auto",
}
CHAT_KEYS: dict[str, str | None] = {
    "builder": "auto",
    "prompt_fn": "chat",
    "image_token": "auto",
}


@dataclass
class InferArguments(Arguments):
    """What `infer.py` runs."""

    run: InferConfig


@dataclass
class ChatArguments(Arguments):
    """What `chat.py` runs."""

    run: ChatConfig


def parse_infer_args(argv: Sequence[str] | None = None) -> InferArguments:
    """Reads the options of a run that answers; raises as `parse_train_args` does."""
    words = sys.argv[1:] if argv is None else argv
    given = by_name(with_configs(read_words(words)))
    asks_dataset = "dataset" in given
    keys = {**with_engine_keys(INFER_KEYS, given), **({"dataset": None} if asks_dataset else {})}
    run, parts, imports = read_arguments(
        words, InferConfig, keys=keys, listed={"dataset": {"split": "test"}}, repeated=("text",)
    )
    check_limits(run)
    check_precision(run)
    check_images(run)
    check_placement(run)
    check_engine(run)
    check_prompts(run, has_dataset=asks_dataset)
    return InferArguments(run=run, parts=parts, imports=imports)


def parse_chat_args(argv: Sequence[str] | None = None) -> ChatArguments:
    """Reads the options of a chat; raises as `parse_train_args` does."""
    run, parts, imports = read_arguments(argv, ChatConfig, keys=CHAT_KEYS)
    check_limits(run)
    check_precision(run)
    check_placement(run)
    check_server(run, model_path=run.model_path)
    return ChatArguments(run=run, parts=parts, imports=imports)
