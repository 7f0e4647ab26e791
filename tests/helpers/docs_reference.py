"""Writes docs/options.md and docs/components.md from the options classes and the registries.

`STAGELINE_BLESS=1 bash scripts/test.sh tests/unit/test_docs_reference.py` writes both pages.
"""

import functools
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field
from typing import Any, Literal

from jsonargparse import ArgumentParser

import commands.train  # noqa: F401 - registers the engines
from options.answer import ChatConfig, EvaluateConfig, InferConfig, LmEvalConfig
from options.corpus import ACTIONS
from options.export import ExportConfig
from options.fields import option_groups, spelled
from options.parts import add_part_options
from options.serve import ServeConfig
from options.train import CheckConfig, RunConfig
from register import ALL_REGISTERS, Register, import_shelf

import_shelf()
TABLE = ["| option | default | meaning |", "|---|---|---|"]
NOTE = "<!-- written by tests/helpers/docs_reference.py -->\n"
COMMANDS = {
    "train, plan, validate": RunConfig,
    "check": CheckConfig,
    "eval": EvaluateConfig,
    "infer": InferConfig,
    "chat": ChatConfig,
    "serve": ServeConfig,
    "lm-eval": LmEvalConfig,
}
OPTIONS_HEAD = """# Options

After this page you know every option of every command, with its default. The list for your
components:

```bash
stageline train --help all
stageline train --dataset sets --loss-fn dpo --help
```

In a file an option is written without dashes: `batch-size: 16` ([rules](command_line.md#rules)).
Options of components are in [components](components.md). Each command also takes `--config`,
`--import`, `--list` and `--help`.
"""
COMPONENTS_HEAD = """# Components

After this page you know every built-in component and its options. The list with file and line,
and the options of one component:

```bash
stageline list
stageline train --loss-fn dpo --collate-fn dpo --help
```

A component is selected by name: `--loss-fn dpo`. Its options start with the name of the registry:
`--loss-fn.beta 0.1`; those of rewards also have their own name: `--reward.number.tolerance 0.1`.
[Add your own](add_a_part.md). `--import examples.spatial.parts` adds those of the
[study](study_spatial.md).
"""


def cell(text: Any) -> str:
    """Return a text for a table cell: one line, with | and < escaped."""
    words = " ".join(str(text).split())
    return words.replace("|", "\\|").replace("<", "&lt;")


def choices(hint: Any) -> list[str]:
    """Return the values of the Literal in a type."""
    if typing.get_origin(hint) is Literal:
        return [str(value) for value in typing.get_args(hint)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [value for one in typing.get_args(hint) for value in choices(one)]
    return []


def default_of(item: Field) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def shown(value: Any) -> str:
    """Return a default as a person types it; nothing for none."""
    if value is None or value == "" or value == []:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{cell(value)}`"


def option_row(name: str, default: Any, hint: Any, text: str) -> str:
    values = choices(hint)
    told = f"`{' '.join(values)}`: " if values and not all(one in text for one in values) else ""
    return f"| `{name}` | {shown(default)} | {told}{cell(text)} |"


def options_page() -> str:
    """Return docs/options.md: a table a group; an option of several commands stands once."""
    lines, before = [NOTE, OPTIONS_HEAD], set()
    for command, config in COMMANDS.items():
        lines.append(f"\n## {command}\n")
        again = []
        for title, items in option_groups(config):
            rows = []
            for item in items:
                row = option_row(
                    spelled(item.name), default_of(item), item.type, item.metadata["help"]
                )
                (again if row in before else rows).append(row)
            before.update(rows)
            if rows:
                lines += [
                    f"\n**{cell(re.sub(r' [(]docs/.*[)]', '', title))}**\n",
                    "| option | default | meaning |",
                    "|---|---|---|",
                ]
                lines += rows
        if again:
            names = ", ".join(row.split(" | ")[0].removeprefix("| ") for row in again)
            lines.append(f"\nAs above: {names}.")
    others = {f"corpus {name}": action for name, action in ACTIONS.items()}
    for name, config in (*others.items(), ("export", ExportConfig)):
        lines += [f"\n## {name}\n", *TABLE]
        for _, items in option_groups(config):
            lines += [
                option_row(spelled(one.name), default_of(one), one.type, one.metadata["help"])
                for one in items
            ]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def part_options(register: Register, key: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, default, type and help of the options of a component."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    add_part_options(parser, register, key)
    for action in parser._actions:
        for name in action.option_strings:
            if "+" not in name and not name.startswith("--print"):
                head = name.replace(f"--{register.name}", register.option, 1)
                yield head, action.default, None, action.help or ""


def components_page() -> str:
    """Return docs/components.md: a table a registry, and one of all options of its components."""
    lines = [NOTE, COMPONENTS_HEAD]
    for name, register in ALL_REGISTERS.items():
        if not len(register):
            continue
        lines += [f"\n## {name} (`{register.option}`)\n", f"{register.holds}\n"]
        lines += ["| name | summary |", "|---|---|"]
        lines += [f"| `{key}` | {cell(register.summary(key))} |" for key in sorted(register)]
        if name == "train_model":  # the same options for most of them
            rows = [option_row(*one) for one in part_options(register, "causal_lm")]
            lines += ["\nOptions of `causal_lm`:\n"] if rows else []
        else:
            found = {key: list(part_options(register, key)) for key in sorted(register)}
            rows = [
                option_row(*one).replace("| `", f"| `{key}` `", 1)
                for key, options in found.items()
                for one in options
            ]
            lines += [""] if rows else []
        if rows:
            lines += [*TABLE, *rows]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


@functools.cache
def pages() -> dict[str, str]:
    """Return file name -> contents of the generated pages."""
    return {"options.md": options_page(), "components.md": components_page()}
