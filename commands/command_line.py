"""The `stageline` command: `stageline train run.yaml total_steps=5` runs a command of this folder.

A command that has a file of its own at the root runs as `python train_pp.py` would. Options and
exit codes are the command's; this file knows none of its options, and loads neither torch nor a
command to list what there is.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stageline.errors import INTERRUPTED, UserError

ROOT = Path(__file__).resolve().parents[1]
CONFIG_NAMES = (".yaml", ".yml", ".json")
ACTION = re.compile("[a-z][a-z-]*")
OVERRIDE = re.compile(r"([A-Za-z][\w-]*)((?:\.[\w.-]+)?)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command: the word after `stageline`."""

    module: str  # below `commands`
    holds: str  # one line for the list
    door: str = ""  # its file at the root, which workers are started with; empty: it has none
    words: tuple[str, ...] = ()  # added to its options
    has_actions: bool = False  # its first word is an action, before files and options
    has_plain_words: bool = False  # its words are passed on unchanged


TRAIN = "train_pp.py"
COMMANDS = {
    "train": Command("train", "train a model in pipeline stages", TRAIN),
    "plan": Command(
        "train", "estimate time, memory and bubble of a training run", TRAIN, ("--plan",)
    ),
    "validate": Command(
        "train", "check options and data of a training run, then stop", TRAIN, ("--check-only",)
    ),
    "runs": Command("runs", "compare the runs of a folder, train a sweep", has_plain_words=True),
    "check": Command("check", "check that the split model equals the unsplit one"),
    "eval": Command("evaluate", "evaluate a model on a dataset", "evaluate.py"),
    "infer": Command("infer", "answer prompts from a file or the command line"),
    "lm-eval": Command("lm_eval", "run tasks of lm-evaluation-harness"),
    "chat": Command("chat", "chat with a model in the terminal"),
    "export": Command("export", "write a checkpoint as a Hugging Face folder", "export.py"),
    "corpus": Command(
        "corpus", "build, merge and check a pre-training corpus", "corpus.py", has_actions=True
    ),
    "serve": Command("serve", "serve a model over HTTP with OpenAI's API", "serve.py"),
    "list": Command("train", "list all components, with file and line", TRAIN, ("--list",)),
}
ENVIRONMENT = "env"


def main() -> int:
    """Run what the command line says.

    Returns:
        The exit code, unless the command ends the process by itself.
    """
    name, *words = sys.argv[1:] or ["--help"]
    try:
        if name in ("-h", "--help", "help"):
            print(overview(), end="")
            return 0
        if name == ENVIRONMENT:
            print(describe())
            return 0
        command = find_command(name)
        num_own = int(command.has_actions and bool(words) and bool(ACTION.fullmatch(words[0])))
        if not command.has_plain_words:
            words = [*words[:num_own], *rewritten(words[num_own:]), *command.words]
        # workers are started with these words again
        if command.door:
            sys.argv = [str(ROOT / command.door), *words]
        else:
            sys.argv = [str(ROOT / "stageline" / "__main__.py"), name, *words]
    except UserError as error:
        print(f"error[{error.kind}]: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the command could take care of it
        return INTERRUPTED
    from stageline.distributed.failure import run_entry

    run_entry(importlib.import_module(f"commands.{command.module}").main)


def overview() -> str:
    """Return all commands of this version, a line each."""
    holds = {name: command.holds for name, command in COMMANDS.items()}
    holds[ENVIRONMENT] = "print versions and devices, for bug reports"
    lines = "\n".join(f"  {name:<20} {text}" for name, text in holds.items())
    return f"""usage: stageline COMMAND [CONFIG.yaml ...] [NAME=VALUE ...] [--option VALUE ...]

{lines}

`stageline COMMAND --help` lists its options. What comes later wins: the config files
in order, NAME=VALUE (learning_rate=1e-4, dataset.test_size=0.2), then options.
"""


def find_command(name: str) -> Command:
    """Return the command of a name."""
    if name in COMMANDS:
        return COMMANDS[name]
    from register import did_you_mean

    known = [*COMMANDS, ENVIRONMENT]
    raise UserError(
        f"{name!r} is not a command of stageline.{did_you_mean(name, known, str)} Begin with one "
        f"of {', '.join(known)}; `stageline --help` has a line on each."
    )


def rewritten(words: Sequence[str]) -> list[str]:
    """Return the words with config files and NAME=VALUE in front of all options as options."""
    front: list[str] = []
    for place, word in enumerate(words):
        match = OVERRIDE.fullmatch(word)
        if word.startswith("-"):
            return [*front, *words[place:]]
        if match:
            front.append(f"--{match[1].replace('_', '-')}{match[2]}={match[3]}")
        elif word.endswith(CONFIG_NAMES):
            front += ["--config", word]
        else:
            raise UserError(f"{word!r} belongs to no option. Put --NAME before it.")
    return front


def describe() -> str:
    """Return what a report of a bug needs: versions, devices, cores and memory of this machine."""
    import torch

    from stageline.device import accelerators

    found = {"python": platform.python_version()}
    for name in ("stageline", "torch", "transformers", "datasets", "peft", "accelerate"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    devices, kind = accelerators(), torch.accelerator.current_accelerator()
    built = f"torch was built for {kind.type if kind else 'none'}"
    found |= {"system": platform.platform(), "accelerator": f"{len(devices)} devices; {built}"}
    for device in devices:
        about = torch.get_device_module(device).get_device_properties(device)
        found[str(device)] = f"{about.name}, {about.total_memory / 2**30:.1f} GiB"
    found["cores"] = str(os.cpu_count())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found["memory"] = f"{memory / 2**30:.1f} GiB"
    return "\n".join(f"{name:<14}{value}" for name, value in found.items())
