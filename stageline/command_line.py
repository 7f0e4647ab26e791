"""The `stageline` command: `stageline train run.yaml total_steps=5` runs an entry file.

Only the package is installed, so the entry files are looked for beside it. They run in this
process as `python train_pp.py` would, options and exit codes are theirs; this file knows none of
their options, and loads neither torch nor them to list what there is.
"""

import difflib
import re
import runpy
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
    """What a word after `stageline` stands for.

    Attributes:
        file: the entry file that it runs.
        holds: one line for the list.
        words: what is added to its options.
        has_actions: its first word says what to do, before files and options.
    """

    file: str
    holds: str
    words: tuple[str, ...] = ()
    has_actions: bool = False


COMMANDS = {
    "train": Command("train_pp.py", "train, the stages of the model on one or several processes"),
    "plan": Command(
        "train_pp.py", "times, memory and bubble of a training, which is not started", ("--plan",)
    ),
    "validate": Command(
        "train_pp.py", "check options and data of a training, then stop", ("--check-only",)
    ),
    "check": Command("check_model.py", "compare a split model with the whole one, on the CPU"),
    "eval": Command("evaluate.py", "answer a dataset, score the answers, report"),
    "infer": Command("infer.py", "answer prompts of a file or of the command line"),
    "lm-eval": Command("lm_eval_run.py", "run tasks of lm-evaluation-harness"),
    "chat": Command("chat.py", "talk with a model in the terminal"),
    "export": Command("export.py", "make one Hugging Face folder of a checkpoint"),
    "corpus": Command(
        "corpus.py", "build, merge, check and show a corpus for pre-training", has_actions=True
    ),
    "serve": Command("serve.py", "answer over HTTP as OpenAI's API does"),
    "list": Command(
        "train_pp.py", "every part that can be chosen, with file and line", ("--list",)
    ),
}
ENVIRONMENT = "env"
ENVIRONMENT_HOLDS = "versions and devices, for a report of a bug"


def main() -> int:
    """Runs what the command line says.

    Returns:
        The exit code, unless the entry file ends the process by itself.
    """
    name, *words = sys.argv[1:] or ["--help"]
    try:
        if name in ("-h", "--help", "help"):
            print(overview(), end="")
            return 0
        if name == ENVIRONMENT:
            from stageline.environment import describe

            print(describe())
            return 0
        path, command = find_entry(name), COMMANDS[name]
        num_own = int(command.has_actions and bool(words) and bool(ACTION.fullmatch(words[0])))
        return run_file(path, [*words[:num_own], *rewritten(words[num_own:]), *command.words])
    except UserError as error:
        print(f"error[{error.kind}]: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the entry file could take care of it
        return INTERRUPTED


def overview() -> str:
    """All commands of this version, a line each."""
    there = {name: item.holds for name, item in COMMANDS.items() if (ROOT / item.file).is_file()}
    lines = [
        f"  {name:<10}{holds}" for name, holds in [*there.items(), (ENVIRONMENT, ENVIRONMENT_HOLDS)]
    ]
    return "\n".join(
        [
            "stageline COMMAND [CONFIG.yaml ...] [NAME=VALUE ...] [--option VALUE ...]",
            "",
            *lines,
            "",
            "`stageline COMMAND --help` lists its options. What comes later wins: the config files",
            "in order, NAME=VALUE (learning_rate=1e-4, dataset.test_size=0.2), then options.",
            "",
        ]
    )


def find_entry(name: str) -> Path:
    """The entry file of a command.

    Raises:
        UserError: there is no such command, or its file is not there.
    """
    command = COMMANDS.get(name)
    if command is None:
        known = [*COMMANDS, ENVIRONMENT]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"{name!r} is no command of stageline.{hint} One of {', '.join(known)} was expected, "
            "because it says what is to be done; `stageline --help` has a line on each."
        )
    if not (ROOT / "register.py").is_file():
        raise UserError(
            f"stageline lies in {ROOT}, and register.py is not beside it. The whole repository was "
            "expected there, because its entry files and parts are not installed: run "
            "`pip install --editable .` in the repository."
        )
    path = ROOT / command.file
    if not path.is_file():
        raise UserError(
            f"`stageline {name}` would run {path}, which is not there: this version has none. "
            "`stageline --help` lists what it has."
        )
    return path


def rewritten(words: Sequence[str]) -> list[str]:
    """The words of an entry file: config files and NAME=VALUE in front become options.

    From the first option on words are left as they are, since they may be values.
    """
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
            raise UserError(
                f"{word!r} belongs to no option. Config files ({', '.join(CONFIG_NAMES)}), "
                "NAME=VALUE or options, --name value, were expected, because every value has a "
                "name. Put the name before it."
            )
    return front


def run_file(path: Path, words: Sequence[str]) -> int:
    """Runs a file in this process as `python path words...` would.

    Workers that it starts get the file and the same words, since these are `sys.argv` now.
    """
    sys.argv = [str(path), *words]
    if not sys.flags.safe_path:  # in place of the folder of the command, or the current one
        del sys.path[0]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    return 0
