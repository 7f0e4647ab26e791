"""What `--help` and `--list` print."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from jsonargparse import ArgumentParser

from options.part_options import short_home
from register import ALL_REGISTERS


def list_parts() -> str:
    """Every register, key, first docstring line and home, as text."""
    lines = []
    for name, register in ALL_REGISTERS.items():
        lines.append(f"{name} ({register.option}): {register.holds}")
        width = max((len(key) for key in register), default=0)
        for key in sorted(register):
            home = short_home(register.home(key))
            lines.append(f"  {key:<{width}}  {register.summary(key)}  [{home}]")
        lines.append("")
    return "\n".join(lines)


def help_text(
    parser: ArgumentParser,
    keys: Mapping[str, str | None],
    chosen: Mapping[str, str],
    *,
    action: str = "",
) -> str:
    program = " ".join([Path(sys.argv[0]).name, *([action] if action else [])])
    lines = [f"usage: {program} {'--KEY-OPTION KEY ... ' if keys else ''}[options]", ""]
    if keys:
        lines.append("Parts, chosen by key (--help after choosing keys lists their own options):")
    for name in keys:
        register = ALL_REGISTERS[name]
        shown = f"{register.option} {chosen.get(name, 'KEY')}"
        if name in chosen:
            place = short_home(register.home(chosen[name]))
            lines.append(f"  {shown:<32} {register.summary(chosen[name])} [{place}]")
        else:
            lines.append(f"  {shown:<32} {register.holds}")
            lines.append(f"  {'':<32} one of: {', '.join(sorted(register)) or '(none)'}")
    lines += [
        *([""] if keys else []),
        "  --import FILE.py | package.module | entry point    parts of your own; repeatable",
        "  --config FILE.yaml    options from a file; the command line wins",
        "  --list                every part with its key, first docstring line and file:line",
        "",
        "",
    ]
    text = re.sub(r", --\S+\+ \S+", "", parser.format_help())  # appending is not our way
    for name in keys:
        text = text.replace(f"--{name}.", ALL_REGISTERS[name].option + ".")
    return "\n".join(lines) + text
