"""The commands, a file each; the files at the root and `stageline COMMAND` hand over to them."""

import dataclasses
import functools

from stageline.errors import name_options


@functools.cache
def option_names() -> frozenset[str]:
    """Every option of every command, as the engine calls it: `num_stages`."""
    from commands.export import make_parser
    from options.answer import ChatConfig, InferConfig
    from options.answer_args import LmEvalConfig
    from options.corpus import ACTIONS
    from options.serve import ServeConfig
    from options.train import CheckConfig, EvaluateConfig
    from register import ALL_REGISTERS

    configs = [CheckConfig, EvaluateConfig, InferConfig, ChatConfig, LmEvalConfig, ServeConfig]
    configs += [action.config for action in ACTIONS.values()]
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    exports = {action.dest for action in make_parser()._actions}
    keys = {register.option[2:].replace("-", "_") for register in ALL_REGISTERS.values()}
    # `num_expand` is the option of scripts/expand_blocks.sh
    return frozenset({*fields, *exports, *keys, *ALL_REGISTERS, "import", "num_expand"})


name_options(option_names)
