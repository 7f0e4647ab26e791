"""The commands, a file each; the files at the root and `stageline COMMAND` hand over to them."""

import dataclasses
import functools
import sys

from stageline.errors import name_options
from stageline.terminal import is_first as is_first
from stageline.terminal import terminal


def open_shelf(*names: str) -> None:
    """Imports the shelf modules of a command; all of them where `--list` is to show them."""
    from register import import_shelf

    import_shelf(*(() if "--list" in sys.argv else names))


def say(text: str) -> None:
    """Prints a text once in a run."""
    terminal.say(text)


@functools.cache
def run_configs() -> tuple[type, ...]:
    """The options class of every command."""
    from options.answer import ChatConfig, EvaluateConfig, InferConfig, LmEvalConfig
    from options.corpus import ACTIONS
    from options.serve import ServeConfig
    from options.train import CheckConfig

    answering = (EvaluateConfig, InferConfig, ChatConfig, LmEvalConfig, ServeConfig)
    return (CheckConfig, *answering, *(action.config for action in ACTIONS.values()))


@functools.cache
def option_names() -> frozenset[str]:
    """Every option of every command, as the engine calls it: `num_stages`."""
    from commands.export import make_parser
    from register import ALL_REGISTERS

    fields = {field.name for config in run_configs() for field in dataclasses.fields(config)}
    exports = {action.dest for action in make_parser()._actions}
    keys = {register.option[2:].replace("-", "_") for register in ALL_REGISTERS.values()}
    # `num_expand` is the option of scripts/expand_blocks.sh
    return frozenset({*fields, *exports, *keys, *ALL_REGISTERS, "import", "num_expand"})


name_options(option_names)
