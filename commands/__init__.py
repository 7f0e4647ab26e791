"""Commands, one per file; the files at the root and `stageline COMMAND` call them."""

import dataclasses
import functools
import gc
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stageline.distributed.terminal import is_first as is_first
from stageline.distributed.terminal import terminal
from stageline.errors import UserError, name_options
from stageline.hub import local_folder, pinned_set, read_name

gc.set_threshold(20_000)  # fewer collections while modules are imported, a quarter of that time
say = terminal.say  # prints a text once in a run
Run = TypeVar("Run")
Read = TypeVar("Read")


def start(
    parse: Callable[[], Read],
    *shelf: str,
    recorded: Callable[[Any], Mapping[str, Any]] = lambda config: {},
) -> Read:
    """Register the components of a command, read its options, and find what they name on a hub.

    Args:
        shelf: modules of shipped components; `--list` shows all of them.
        recorded: options -> config of an earlier start; see `with_folders`.
    """
    from register import ALL_REGISTERS, import_shelf

    if shelf or "--list" in sys.argv:
        import_shelf(*(() if "--list" in sys.argv else shelf))
    arguments: Any = parse()
    for register in ALL_REGISTERS.values():  # all components are imported
        register.is_frozen = True
    config = with_folders(arguments.run, recorded=recorded(arguments.run))
    return dataclasses.replace(arguments, run=config)


def check_installed(*packages: str, extra: str) -> None:
    """Refuse packages that are missing, by the name of the extra that brings them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not installed. Run bash scripts/setup.sh {extra}, or pip "
            f"install --editable '.[{extra}]'."
        )


def quiet_transformers() -> None:
    """Turn off the progress bars and warnings of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def with_folders(run: Run, *, recorded: Mapping[str, Any] = {}) -> Run:
    """Return the options with folders of this machine in the place of names on a hub.

    The process that starts others does this first; they find what it has found.

    Args:
        recorded: config of an earlier start, by the names in it: of a name that is there, too, its
            commit is taken, whatever its branch has become.
    """
    from options.fields import as_list, option_fields, replaced, value_of, with_paths  # reads YAML

    changes: dict[str, Any] = {}
    for item in option_fields(run).values():
        value = value_of(run, item.name)
        if not item.metadata["takes_name"] or not value:
            continue
        find = pinned_set if item.metadata["is_pattern"] else local_folder
        option, then = f"`{item.name}`", as_list(recorded.get(item.name.replace("_", "-")))

        def put(given: str, find: Any = find, then: Any = then, option: str = option) -> str:
            return str(find(with_commit(given, then), option=option))

        changes[item.name] = with_paths(item, value, put)
    return _with_dtype(replaced(run, changes))


def with_commit(given: str, recorded: Iterable[str]) -> str:
    """Return a name with the commit that an earlier start of the run recorded, if any."""
    name = read_name(given)
    if name is not None and not name.is_pinned:
        for old in recorded:
            then = read_name(str(old))
            if then is not None and then.repo == name.repo and then.is_pinned:
                return old
    return given


def _with_dtype(run: Any) -> Any:
    """Replace `dtype` auto by the precision that the model's config.json names, if it names one.

    The file is read as JSON, since importing transformers takes seconds.
    """
    if getattr(run, "dtype", None) is None or not hasattr(run, "bf16"):
        return run
    path = Path(getattr(run, "config_path", None) or run.model_path or "")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        from stageline.checkpoint.adapter import find_base

        path = find_base(path)
    file = path / "config.json" if path.is_dir() else path
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    parts = [config, *(config.get(name) or {} for name in ("text_config", "llm_config"))]
    dtypes = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    named = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype]
    found: dict[str, Any] = {"bf16": run.bf16, "fp16": run.fp16}
    if named:
        if named[0] not in ("bfloat16", "float16", "float32"):
            raise UserError(
                f"`dtype` auto found {named[0]} in {file}, which runs do not compute in. Drop "
                "`dtype` and give `bf16`, `fp16` or neither."
            )
        found = {"bf16": named[0] == "bfloat16", "fp16": named[0] == "float16"}
    if hasattr(run, "fp32") and not any(found.values()):
        found["fp32"] = type(run.fp32)()  # all is float32; the saved config must be repeatable
    return dataclasses.replace(run, dtype=None, **found)


@functools.cache
def run_configs() -> tuple[type, ...]:
    """Return the options class of every command."""
    from options.answer import ChatConfig, EvaluateConfig, InferConfig, LmEvalConfig
    from options.corpus import ACTIONS
    from options.export import ExportConfig
    from options.serve import ServeConfig
    from options.train import CheckConfig

    answering = (EvaluateConfig, InferConfig, ChatConfig, LmEvalConfig, ServeConfig)
    return (CheckConfig, ExportConfig, *answering, *ACTIONS.values())


@functools.cache
def option_names() -> dict[str, str]:
    """Return the options of all commands, as the engine calls them -> as they are typed."""
    from options.fields import argument_name, option_fields, spelled
    from register import ALL_REGISTERS

    items = [item for config in run_configs() for item in option_fields(config).values()]
    names = {name: item.name for item in items if "_" in (name := argument_name(item))}
    names |= {item.name: item.name for item in items}
    keys = [register.option[2:].replace("-", "_") for register in ALL_REGISTERS.values()]
    names |= dict(zip(keys, keys, strict=True)) | {name: name for name in ALL_REGISTERS}
    return {name: spelled(option) for name, option in (names | {"import": "import"}).items()}


name_options(option_names)
