"""Parse command line and YAML into the config of a run and the kwargs of each component.

Two passes: the first finds `--import`, `--config` and the keys; the second knows the options of the
chosen parts, converts every value by its type (jsonargparse) and refuses what it does not know.
Registers are filled by the entry file before; no model, data or device is touched here.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import yaml
from jsonargparse import ArgumentParser

from options import answer, corpus, data, export, model, serve, train
from options.command_line import (
    COMMAND_LINE,
    Given,
    by_name,
    command_words,
    convert,
    drop_rivals,
    needs_value,
    program_name,
    read_config,
    read_words,
    refuse_unknown,
)
from options.fields import (
    HELP,
    OptionError,
    absolute,
    check_limits,
    check_together,
    expanded,
    option_fields,
    replaced,
    spelled,
    value_of,
)
from options.parts import ChosenPart, add_part_options, chosen_part, help_text, list_parts, takes
from register import ALL_REGISTERS, did_you_mean, import_parts

# registry -> default key; None: the user must choose
TRAIN_KEYS: dict[str, str | None] = {
    "train_model": "auto",
    "dataset": None,
    "prompt": None,
    "prompt_fn": None,
    "image_token": None,
    "collate_fn": None,
    "loss_fn": "sft",
    "optimizer": "adamw",
    "lr_scheduler": "cosine",
    "tracker": "none",
    "engine": "pipeline",
}
# registry -> the registry whose component takes it as an argument, and without which it is unused
OWNED_KEYS = {"sim_fn": "loss_fn", "reward": "loss_fn", "environment": "loss_fn"}
EVALUATE_KEYS: dict[str, str | None] = dict.fromkeys(
    ("model", "builder", "dataset", "prompt", "prompt_fn", "image_token", "metric")
)
INFER_KEYS: dict[str, str | None] = {
    "model": "generate",
    "builder": "auto",
    "prompt": "chat",
    "prompt_fn": "chat",
    "image_token": "auto",
}
SERVE_KEYS: dict[str, str | None] = {"prompt_fn": "chat", "image_token": "auto"}
CHAT_KEYS = {"builder": "auto", **SERVE_KEYS}
# a check needs these keys of a training run only with a dataset
DATA_KEYS = ("dataset", "prompt", "prompt_fn", "image_token", "collate_fn")
SPECIAL = ("import", "config", "list", "help")  # answered before the options are known
# option -> the one that follows from it. If typed, either wins; a saved config has both, and there
# the first wins.
FOLLOWING = {"num_train_epochs": "total_steps", "warmup_ratio": "warmup_steps"}
TEST_SPLIT = {"dataset.split": "test"}  # an option although the run supplies it
Keys: TypeAlias = Mapping[str, str | None]
Run = TypeVar("Run", covariant=True)


@dataclass(frozen=True)
class Arguments(Generic[Run]):
    """A resolved command line."""

    run: Run  # options that belong to no component
    parts: dict[str, ChosenPart]  # register name -> the chosen component and its kwargs
    imports: list[str]  # modules of `--import`, in order

    def as_config(self) -> dict[str, Any]:
        """Return all options by their names on the command line; paths are absolute."""
        config: dict[str, Any] = {}
        if self.imports:
            config["import"] = [
                str(Path(spec).expanduser().absolute()) if spec.endswith(".py") else spec
                for spec in self.imports
            ]
        for name, chosen in self.parts.items():
            config[spelled(name)[2:]] = chosen.key
        for item in option_fields(self.run).values():
            if not item.metadata["is_saved"]:
                continue
            config[spelled(item.name)[2:]] = absolute(item, value_of(self.run, item.name))
        for name, chosen in self.parts.items():
            for option, value in chosen.kwargs.items():
                config[spelled(f"{name}.{option}")[2:]] = value
        return config


TrainArguments: TypeAlias = Arguments[train.RunConfig]
EvaluateArguments: TypeAlias = Arguments[answer.EvaluateConfig]
CheckArguments: TypeAlias = Arguments[train.CheckConfig]


@dataclass(frozen=True)
class CorpusArguments(Arguments[Any]):
    """An action of `corpus.py`, and its options."""

    action: str


def parse_train_args(argv: Sequence[str] | None = None) -> TrainArguments:
    """Read the options of a training run, by default of the words of this process."""

    def keys(given: Mapping[str, Given]) -> Keys:
        asked = given["eval_completions"].values if "eval_completions" in given else ["0"]
        is_scored = not {"metric", "help"}.isdisjoint(given) or asked[-1:] not in ([], ["0"])
        return TRAIN_KEYS | ({"metric": "exact_match"} if is_scored else {})

    arguments = _settled(read_arguments(argv, train.RunConfig, keys=keys))
    run = arguments.run
    model.check_vision(run)
    data.check_batches(run)
    train.check_learning_rate(run)
    train.check_rollouts(run, arguments.parts)
    train.check_completions(run, arguments.parts)
    return arguments


def parse_check_args(argv: Sequence[str] | None = None) -> CheckArguments:
    """Read the options of a check: those of a training run, with or without a dataset."""

    def keys(given: Mapping[str, Given]) -> Keys:
        has_data = not {"dataset", "dataset_path", "help"}.isdisjoint(given)
        # an export uses the architecture's own component
        left_out = {"train_model"} if "exported" in given else set()
        left_out |= set() if has_data else {*DATA_KEYS}
        return {one: key for one, key in TRAIN_KEYS.items() if one in given or one not in left_out}

    arguments = read_arguments(argv, train.CheckConfig, keys=keys)
    if arguments.run.exported is None:
        return _settled(arguments)
    return replace(arguments, run=train.settled(arguments.run))


def _settled(arguments: Arguments[Any]) -> Arguments[Any]:
    """Fill in what follows from other options; refuse what a split model cannot do."""
    run = train.settled(arguments.run)
    train.check_partition(run)
    model.check_part_training(run)
    model.check_lora(run)
    train.check_attention(run, arguments.parts["train_model"])
    return replace(arguments, run=run)


def _command(
    config: type, keys: Any, *checks: Callable[[Any], object], **reading: Any
) -> Callable[..., Arguments[Any]]:
    """Return the function that reads the options of a command and checks them.

    It raises as `parse_train_args` does.
    """

    def parse(argv: Sequence[str] | None = None) -> Arguments[Any]:
        arguments = read_arguments(argv, config, keys=keys, **reading)
        for check in checks:
            check(arguments.run)
        return arguments

    return parse


parse_evaluate_args = _command(
    answer.EvaluateConfig,
    functools.partial(answer.with_engine_keys, EVALUATE_KEYS),
    *(answer.check_engine, model.adapter_arguments, answer.device_memory),
    listed=TEST_SPLIT,
)
parse_chat_args = _command(answer.ChatConfig, CHAT_KEYS, answer.device_memory)
parse_lm_eval_args = _command(answer.LmEvalConfig, {}, answer.check_has_model)
parse_serve_args = _command(
    serve.ServeConfig, SERVE_KEYS, answer.check_has_model, serve.named_adapters
)
parse_export_args = _command(export.ExportConfig, {}, export.shard_bytes)


def parse_infer_args(argv: Sequence[str] | None = None) -> Arguments[answer.InferConfig]:
    """Read the options of a run that answers; raises as `parse_train_args` does."""

    def keys(given: Mapping[str, Given]) -> Keys:
        found = answer.with_engine_keys(INFER_KEYS, given)
        return found | {"dataset": None} if "dataset" in given else found

    arguments = read_arguments(
        argv, answer.InferConfig, keys=keys, listed=TEST_SPLIT, repeated=("text",)
    )
    answer.device_memory(arguments.run)
    answer.check_engine(arguments.run)
    sources = arguments.run.prompts, arguments.run.text, "dataset" in arguments.parts
    if (count := len([*filter(None, sources)])) != 1:
        raise OptionError(
            f"{count} of --prompts, --text and --dataset were given. Give one: --prompts FILE, "
            "--text '...' or --dataset KEY."
        )
    return arguments


def parse_corpus_args(argv: Sequence[str] | None = None) -> CorpusArguments:
    """Read an action of the corpus and its options; raises as `parse_train_args` does."""
    name, words = corpus.split_action(command_words(argv))
    if name == "find-trained":
        words = corpus.with_run(words)
    if name is None and words in (["--help"], ["-h"], []):
        print(corpus.overview())
        raise SystemExit(0 if words else OptionError.exit_code)
    if name not in corpus.ACTIONS and words != ["--list"]:
        word, known = name or words[0], corpus.ACTIONS
        raise OptionError(
            f"{word!r} is not an action of corpus.py.{did_you_mean(word, known, str)} Begin with "
            f"one of {', '.join(known)}; `corpus.py --help` has a line on each."
        )
    action = name or "verify"  # --list is the same for all actions
    keys = corpus.KEYS.get(action, {})
    given = read_arguments(words, corpus.ACTIONS[action], keys=keys, action=action)
    return CorpusArguments(given.run, given.parts, given.imports, action=action)


def save_config(arguments: Arguments, path: str | Path) -> None:
    """Write every option with its value; `--config path` repeats the run."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = "# Every option of this run. Repeat it with --config and this file.\n"
    # only types that plain YAML has
    plain = json.loads(
        json.dumps(
            arguments.as_config(), default=lambda one: [*one] if isinstance(one, set) else str(one)
        )
    )
    body = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(header + body, encoding="utf-8")
    temporary.replace(path)  # a torn write then leaves no half file


def read_arguments(
    argv: Sequence[str] | None,
    config_class: type,
    *,
    keys: Keys | Callable[[Mapping[str, Given]], Keys],
    listed: Mapping[str, Any] = {},
    repeated: Sequence[str] = (),
    action: str = "",
) -> Arguments[Any]:
    """Read the words of a command, in both passes.

    Args:
        keys: the registers that this program chooses from, with their default keys; or a function
            of the options that were given.
        listed: options of components that the run supplies elsewhere, with their defaults.
        repeated: options that may be given several times, a text each time.
    """
    # words and files: name -> what was given
    settable = option_fields(config_class)
    typed = read_words(command_words(argv), settable)
    files: list[Given] = []  # in front, so that the command line wins
    for item in typed:
        if item.name == "config":
            if not item.values:
                raise OptionError(needs_value(item, "the path of a YAML file"))
            for path in item.values:
                files += read_config(path, settable)
    given = [*files, *typed]
    options = by_name(given, repeated)
    if callable(keys):
        keys = keys(options)
    imports = list(
        dict.fromkeys(one for item in given if item.name == "import" for one in item.values)
    )
    import_parts(imports)
    # options of a register under its name, however it is spelled
    registers = {_spelled(name): name for name in keys}
    for name in list(options):
        head, dot, tail = name.partition(".")
        if head in registers:
            options[registers[head] + dot + tail] = options.pop(name)
    drop_rivals(options, FOLLOWING)
    if "list" in options:
        _print_and_stop(list_parts())

    # the components
    help_words = options.pop("help", None)
    keys = _with_defaults(options, keys)
    chosen = _choose(options, keys, may_miss=help_words is not None)
    owned = _owned_keys(options, chosen)
    keys = {**keys, **owned}
    chosen |= _choose(options, owned, may_miss=help_words is not None)
    if help_words is not None:
        shows_all = "all" in help_words.values
        typed_keys = {name: key for name, key in chosen.items() if shows_all or name in options}
        parser = _build_parser([], typed_keys, listed=listed)
        shown = {name: chosen.get(name) or HELP["usual"].get(name, "needed") for name in keys}
        _print_and_stop(help_text(config_class, parser, shown, shows_all=shows_all, action=action))
    known = [*settable, *map(_spelled, keys), *SPECIAL]
    if missing := [name for name in keys if name not in chosen]:
        ours = {*map(_spelled, ALL_REGISTERS), *ALL_REGISTERS, *known}
        rest = [name for name in options if ours.isdisjoint((name, name.partition(".")[0]))]
        refuse_unknown({name: options[name] for name in rest}, known)
        raise OptionError(_missing(missing, options))

    # Parse the given values only: parsing defaults would take two thirds of the time.
    settings = {
        name: item for name, item in options.items() if name not in keys and name not in SPECIAL
    }
    set_here = [item for item in settable.values() if item.name in settings]
    parser = _build_parser(set_here, chosen, listed=listed)
    values = convert(parser, settings, also_known=known)
    run = replaced(
        config_class(), {item.name: expanded(item, values[item.name]) for item in set_here}
    )
    parts = {name: chosen_part(name, key, values.get(name) or {}) for name, key in chosen.items()}
    check_limits(run)
    check_together(run)
    return Arguments(run, parts, imports)


def _spelled(name: str) -> str:
    """Return the option that a key of a register is given with, as a name."""
    return ALL_REGISTERS[name].option[2:].replace("-", "_")


def _with_defaults(options: Mapping[str, Given], keys: Keys) -> dict[str, str | None]:
    """Return the keys with those that follow from a file, from the loss and other components."""
    found = dict(keys)
    given = {name: item.values[0] for name, item in options.items() if len(item.values) == 1}
    if keys.get("dataset", "") is None and (path := given.get("dataset_path")):
        is_json = (
            path.endswith((".jsonl", ".ndjson", ".json")) or Path(path, "train.jsonl").exists()
        )
        is_corpus = Path(f"{path}.idx").exists()
        found["dataset"] = "jsonl" if is_json else "corpus" if is_corpus else "sets"
    if keys.get("collate_fn", "") is None:
        dataset, loss = (given.get(name) or found[name] for name in ("dataset", "loss_fn"))
        known = ALL_REGISTERS["collate_fn"]
        found["collate_fn"] = "pt" if dataset == "corpus" else loss if loss in known else "sft"
    suggested: dict[str, str] = {}
    for name in ("collate_fn", "model"):  # components of these may name keys that suit them
        key, register = given.get(name) or found.get(name) or "", ALL_REGISTERS[name]
        if name in keys and key in register:
            suggested |= register.entry(key).facts.default_keys
    return {one: suggested.get(one, default) for one, default in found.items()}


def _choose(options: Mapping[str, Given], keys: Keys, *, may_miss: bool) -> dict[str, str]:
    """Resolve every key, before anything is loaded."""
    chosen: dict[str, str] = {}
    for name, default in keys.items():
        register, item = ALL_REGISTERS[name], options.get(name)
        if item is None:
            key, place = default, " (the default)"
            if key is None or (may_miss and key not in register):
                continue
        else:
            if not item.values or (len(item.values) > 1 and not register.takes_several):
                raise OptionError(needs_value(item, f"one {name} of `stageline list`"))
            key = ",".join(item.values)
            place = "" if item.origin == COMMAND_LINE else f" ({item.origin})"
        for one in key.split(",") if register.takes_several else [key]:
            register.entry(one, option=register.option + place)
        chosen[name] = key
    return chosen


def _missing(names: Sequence[str], options: Mapping[str, Given]) -> str:
    """Return the error of registries without a choice, with what most runs have."""
    found, usual = {}, HELP["usual"]
    if "dataset" in names:
        if {"model_path", "config_path", "train_model", "builder"}.isdisjoint(options):
            found["--model-path"] = "org/model"
        found["--dataset-path"] = "rows.jsonl"
    lead = f"Example: {program_name()}" if "--model-path" in found else "Usual:"
    for own in (ALL_REGISTERS[name] for name in names if name != "dataset"):
        key = usual.get(own.name, "|".join(sorted(own)))
        found[own.option] = key.removeprefix("usual: ")
    *front, last = found
    told = f"{', '.join(front)} and {last} are" if front else f"{last} is"
    return f"{told} missing. {lead} {' '.join(f'{name} {key}' for name, key in found.items())}."


def _owned_keys(options: Mapping[str, Given], chosen: Mapping[str, str]) -> dict[str, None]:
    """Return the registers of `OWNED_KEYS` that this run chooses from."""
    found: dict[str, None] = {}
    for name, owner in OWNED_KEYS.items():
        key = chosen.get(owner)
        if key is None:
            continue
        has = takes(ALL_REGISTERS[owner][key], name)
        is_own = name in ("reward", "environment")  # the run calls them, before the loss
        if is_own and ALL_REGISTERS[owner].entry(key).facts.samples_answers:
            has = "needs" if name == "reward" else "may have"
        if has == "needs" or (has == "may have" and name in options):
            found[name] = None
        elif name in options:
            raise OptionError(
                f"{options[name]}: {spelled(owner)} {key} takes no {name}. Drop {spelled(name)}, "
                f"or choose another {spelled(owner)}."
            )
    return found


def _build_parser(
    items: Iterable[Field], chosen: Mapping[str, str], *, listed: Mapping[str, Any]
) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    for item in items:
        parser.add_argument(spelled(item.name), type=item.type, default=item.default)
    for name, key in chosen.items():
        add_part_options(parser, ALL_REGISTERS[name], key, listed=listed)
    known = {action.dest for action in parser._actions}
    parser.set_defaults({name: value for name, value in listed.items() if name in known})
    return parser


def _print_and_stop(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        try:
            print(text, flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(0)
