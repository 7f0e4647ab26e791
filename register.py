"""Registries: every component of an experiment has a key here. Standard library only.

A component is registered by a decorator or by item assignment, and chosen by its key:

    @loss_fn_register("sft", "cross_entropy")
    def sft(logits_BTV, micro_batch, *, num_targets): ...

    prompt_register["vqa"] = "[IMAGE]\\n[QUESTION]\\n[ANSWER]"

A run has to know more of some components than their signature; these facts are arguments of the
decorator:

    @loss_fn_register("rm", predicts_tokens=False)

This file does not know any key. Options are parsed in parse_args.py; entry files load the shipped
components with `import_shelf()` and those of a user with `import_parts()`.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent
SHELF = (
    "models",
    "train_model",
    "prompt",
    "prompt_fn",
    "dataset",
    "loss_fn",
    "optimizer",
    "metric",
    "tracker",
    "corpus_parts",
)
ENTRY_POINT_GROUP = "stageline.parts"


class RegisterError(ValueError):
    """A wrong key, a key given twice, or a module of parts that cannot be imported."""

    exit_code = 2

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnknownKeyError(RegisterError, KeyError):
    """A key that a register does not hold. A `KeyError` too, so that `get()` and `pop()` work."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a component that a run needs in addition to its signature."""

    without_effect: tuple[str, ...] = ()  # options that change no result, only speed or place
    # {"loss_fn": "rm"}: keys of other registers that suit a model or a collate_fn part
    default_keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelFacts(Facts):
    for_generation: bool = True  # False: the whole text is rendered, with its end


@dataclass(frozen=True, kw_only=True)
class TrainModelFacts(Facts):
    gives_scores: bool = False  # a score for each token in place of logits
    model_types: tuple[str, ...] = ()  # accepted model_type values; empty: any


@dataclass(frozen=True, kw_only=True)
class BuilderFacts(Facts):
    plan: Callable[..., str] | None = None  # (the part's arguments) -> what --plan prints


@dataclass(frozen=True, kw_only=True)
class PromptFnFacts(Facts):
    prepare: Callable[..., object] | None = None  # (processor, **own options), before any row


@dataclass(frozen=True, kw_only=True)
class CollateFacts(Facts):
    needs_groups: bool = False  # the samples of a group are compared
    takes_tokens: bool = False  # samples may be token ids in place of text
    gives_prompts: bool = False  # rows end where an answer begins


@dataclass(frozen=True, kw_only=True)
class LossFacts(Facts):
    # argument -> function of a micro-batch, summed over the whole batch
    counts: Mapping[str, Callable[..., int]] = field(default_factory=dict)
    is_token_sum: bool = False  # --logits-chunk may call it with a few tokens at a time
    is_cross_entropy: bool = False  # the mean over tokens, its exp is the perplexity
    predicts_tokens: bool = True  # False: it takes scores, and there is no token accuracy
    # micro_batch["loss_reference"] of the start model, and micro_batch["loss_kl"], are read; or a
    # function of its own options
    needs_reference: bool | Callable[..., bool] = False
    needs_kl: bool | Callable[..., bool] = False
    weighs_by_itself: bool = False  # it need not add up over micro-batches
    reads_by_token: bool = False  # --logits-chunk gives it ChunkedLogits, for policy_loss.py
    samples_answers: bool = False  # the model answers before each step, for rewards


@dataclass(frozen=True, kw_only=True)
class RewardFacts(Facts):
    takes_lots: bool = False  # it need not see all answers of a step together
    is_dear: bool = False  # a check does not call it


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts(Facts):
    needs_whole: bool = False  # it needs whole matrices, so --dp-shard is refused


@dataclass(frozen=True, kw_only=True)
class EngineFacts(Facts):
    topology: Callable[..., Any] | None = None  # the options -> its stages and ranks


@dataclass(frozen=True, kw_only=True)
class DocumentFacts(Facts):
    columns_of: Callable[..., list[str]] | None = None  # own options -> the fields read of a row


@dataclass(frozen=True, kw_only=True)
class SplitterFacts(Facts):
    splits_sentences: bool = True  # False: it is not called, pieces can be near-equal


@dataclass(frozen=True)
class Entry:
    """A key of a register.

    Attributes:
        part: the function, class or text.
        home: `file:line` where it was registered.
        facts: of the register's class of facts.
    """

    key: str
    part: Any
    home: str
    facts: Any


class Register(MutableMapping[str, Any]):
    """Maps keys to parts. Refuses a key that is taken, and knows where each part was registered.

    `data` holds an `Entry` for each key; `register[key]` is the part itself.

    Args:
        name: what the parts are called, `loss_fn`; also names the option, `--loss-fn`.
        holds: one line saying what a part does; shown by `--list`.
        contract: how the run calls a part: `part(rows, *, path, [step], **own)`, arguments in
            brackets where it takes them. The options that go to it by name may be left out.
        part_type: `callable`, or the type that each part has.
        option: the option that takes a key, where it is not the name.
        facts: the class of what a run has to know of a part.
        takes_several: the option takes several keys, a,b, and options are those of one of them.
    """

    def __init__(
        self,
        name: str,
        holds: str = "",
        contract: str = "part()",
        *,
        part_type: Any = callable,
        option: str | None = None,
        facts: type[Facts] = Facts,
        takes_several: bool = False,
    ) -> None:
        self.data: dict[str, Entry] = {}
        self.name = name
        self.holds = holds
        self.contract = contract
        self.part_type = part_type
        self.option = option or "--" + name.replace("_", "-")
        self.facts = facts
        self.takes_several = takes_several
        self.is_frozen = False

    def __call__(self, *keys: str, replace: bool = False, **facts: Any) -> Callable:
        """Decorate a function or class to register it under one or more keys, unchanged."""
        if not keys or not all(isinstance(key, str) for key in keys):
            raise RegisterError(
                f"@{self.name}_register was used without a key. Write "
                f"@{self.name}_register('my_key')."
            )
        home = _caller_home()

        def decorate(part: Any) -> Any:
            for key in keys:
                self._add(key, part, home=home, replace=replace, facts=facts)
            return part

        return decorate

    def register(self, key: str, part: Any, *, replace: bool = False, **facts: Any) -> None:
        """Register a part; with `replace=True` also when the key is taken."""
        self._add(key, part, home=_caller_home(), replace=replace, facts=facts)

    def __setitem__(self, key: str, part: Any) -> None:
        self._add(key, part, home=_caller_home())

    def __getitem__(self, key: str) -> Any:
        return self.entry(key).part

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def __delitem__(self, key: str) -> None:
        self._refuse_if_frozen(key)
        del self.data[self.entry(key).key]  # an unknown key gets the error with suggestions

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def entry(self, key: str, *, option: str | None = None) -> Entry:
        """Return what is known of `key`.

        Args:
            option: the option that asked, for the error message; by default the register's own.

        Raises:
            UnknownKeyError: names the register, the option, the nearest keys and all keys.
        """
        if key in self.data:
            return self.data[key]
        known = sorted(self.data)
        near = difflib.get_close_matches(str(key).lower(), known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        how = f"@{self.name}_register({str(key)!r})   # above the function or class"
        if self.part_type is str:
            how = f"{self.name}_register[{str(key)!r}] = '...'"
        raise UnknownKeyError(
            f"{option or self.option} {key}: {self.name}_register has no key {key!r}.{hint}\n"
            f"  It holds: {', '.join(known) or 'nothing (no shelf file was imported)'}.\n"
            f"  To add one, write in a file of yours\n"
            f"    from register import {self.name}_register\n"
            f"    {how}\n"
            f"  and pass it with --import that_file.py. --list shows every part."
        )

    def home(self, key: str) -> str:
        """Return the place where the component was registered, as `file:line`."""
        return self.entry(key).home

    def summary(self, key: str) -> str:
        """Return the first line of a component's docstring, or a string on one line."""
        part = self[key]
        if self.part_type is str:
            return part.replace("\n", "\\n")
        while isinstance(part, functools.partial) and "__doc__" not in vars(part):
            part = part.func
        lines = (inspect.getdoc(part) or "").strip().splitlines()
        return lines[0] if lines else "(no docstring)"

    def freeze(self) -> None:
        """Refuse every later addition, replacement and removal."""
        self.is_frozen = True

    @property
    def handed(self) -> tuple[int, frozenset[str]]:
        """The number of positional arguments in the contract, and the names of its others."""
        arguments = re.sub(r"\*\*\w+", "", self.contract).removeprefix("part")
        positional, _, others = arguments.partition("*")
        return len(re.findall(r"\w+", positional)), frozenset(re.findall(r"\w+", others))

    def _add(
        self,
        key: str,
        part: Any,
        *,
        home: str,
        replace: bool = False,
        facts: Mapping[str, Any] = {},
    ) -> None:
        self._refuse_if_frozen(key)
        if not isinstance(key, str) or not key or key != key.strip() or key.startswith("-"):
            raise RegisterError(
                f"{self.name}_register got the key {key!r} at {home}. A key is a non-empty string "
                f"without outer spaces or a leading '-': it is typed after {self.option}."
            )
        is_callable = self.part_type is callable
        if not (callable(part) if is_callable else isinstance(part, self.part_type)):
            wanted = getattr(self.part_type, "__name__", self.part_type)
            raise RegisterError(
                f"{self.name}_register[{key!r}] got a {type(part).__name__} at {home}. Register "
                f"a {wanted!r}: {self.holds or 'see register.py'}."
            )
        known = [item.name for item in dataclasses.fields(self.facts)]
        for fact in facts.keys() - set(known):
            near = difflib.get_close_matches(fact, known, n=2, cutoff=0.6)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise RegisterError(
                f"{self.name}_register[{key!r}] has {fact}={facts[fact]!r} at {home}, and no "
                f"{self.name} part has such a fact.{hint} Known are: {', '.join(sorted(known))} "
                "(docs/add_a_part.md)."
            )
        if key in self.data and not replace:
            raise RegisterError(
                f"{self.name}_register[{key!r}] is registered twice: first at {self.home(key)}, "
                f"again at {home}. Choose another key, or say replace=True at the second one."
            )
        self.data[key] = Entry(key, part, home, self.facts(**facts))

    def _refuse_if_frozen(self, key: object) -> None:
        if self.is_frozen:
            raise RegisterError(
                f"{self.name}_register was changed (key {key!r}) at {_caller_home()} after it was "
                f"frozen. Register parts at the top level of a file given with --import."
            )


def _caller_home() -> str:
    """Return `file:line` that registers a component: the outermost call in its file."""
    frame = sys._getframe(1)
    ours = {__name__, "_collections_abc", "collections.abc"}
    while frame.f_back is not None and frame.f_globals.get("__name__") in ours:
        frame = frame.f_back
    file = frame.f_code.co_filename
    while frame.f_back is not None and frame.f_back.f_code.co_filename == file:
        frame = frame.f_back
    return f"{file}:{frame.f_lineno}"


# docs/add_a_part.md explains these contracts.
model_register = Register(
    "model",
    "generates: (model, processor, images, prompts) -> texts",
    "part(model, processor, *, images, prompts, [samples, batch_size], **own)",
    facts=ModelFacts,
)
train_model_register = Register(
    "train_model",
    "builds one stage -> (StageModel, processor, pad)",
    "part(*, config_path, processor_path, checkpoint_path, stage, num_stages, dtype, "
    "[model_types, new_rows, lora_taken_from], **model_kwargs)",
    facts=TrainModelFacts,
)
builder_register = Register(
    "builder",
    "loads: path -> (model, processor, device_map)",
    "part(model_path, *, dtype, adapter_path, adapter_weights, placement, **own)",
    facts=BuilderFacts,
)
prompt_register = Register("prompt", "template text with [PLACEHOLDERS]", part_type=str)
prompt_fn_register = Register(
    "prompt_fn",
    "fills a template: (sample, prompt) -> Rendered",
    "part(sample, prompt, *, processor, for_generation, [examples], **own)",
    facts=PromptFnFacts,
)
image_token_register = Register(
    "image_token",
    "puts the model's own image text into a Rendered",
    "part(rendered, images, *, processor)",
)
dataset_register = Register(
    "dataset",
    "map-style dataset of (images | None, sample dict)",
    "part(*, dataset_path, split, **own)",
)
collate_fn_register = Register(
    "collate_fn",
    "samples -> tensors of one micro-batch",
    "part(samples, *, prompt, prompt_fn, image_token, processor, pad_token_id, max_token_num, "
    "stage, num_stages, [pad_to_multiple_of], **own)",
    facts=CollateFacts,
)
loss_fn_register = Register(
    "loss_fn",
    "(logits, micro_batch, num_targets) -> scalar, figures",
    "part(logits_BTV, micro_batch, *, num_targets, [step, sim_fn], **own)",
    facts=LossFacts,
)
sim_fn_register = Register(
    "sim_fn", "similarity of two batches of vectors", "part(a_NV, b_NV, **own)"
)
reward_register = Register(
    "reward",
    "(prompts, completions, samples) -> a number or None for each answer; several: a,b",
    "part(prompts, completions, samples, **own)",
    facts=RewardFacts,
    takes_several=True,
)
metric_register = Register(
    "metric", "(predictions, samples) -> figures", "part(predictions, samples, **own)"
)
optimizer_register = Register(
    "optimizer",
    "parameter groups -> torch optimizer",
    "part(param_groups, *, learning_rate, weight_decay, **own)",
    facts=OptimizerFacts,
)
lr_scheduler_register = Register(
    "lr_scheduler",
    "options -> function from step to learning rate",
    "part(*, learning_rate, min_lr, warmup_steps, warmup_start_lr, total_steps, **own)",
)
tracker_register = Register(
    "tracker",
    "shows a run elsewhere: log(kind, step, figures), close()",
    "part(*, folder, config, start_step, **own)",
)
engine_register = Register(
    "engine",
    "runs the training: pipeline, streaming",
    "part(plan, data)",
    facts=EngineFacts,
)
document_register = Register(
    "document",
    "a row of a text file -> the text of one document",
    "part(row, **own)",
    facts=DocumentFacts,
)
splitter_register = Register(
    "splitter",
    "text -> where its sentences end, in characters",
    "part(text, **own)",
    option="--language",
    facts=SplitterFacts,
)

ALL_REGISTERS: dict[str, Register] = {
    one.name: one for one in list(vars().values()) if isinstance(one, Register)
}


def freeze_registers() -> None:
    """Freeze every registry. An entry file calls it after all components are imported."""
    for register in ALL_REGISTERS.values():
        register.freeze()


def import_shelf(*names: str) -> None:
    """Import shelf modules, and make sure that they are the ones next to this file.

    Args:
        names: some of `SHELF`; all of them when none is given.

    Raises:
        RegisterError: an installed package has taken the name, or the file is missing.
    """
    for name in names or SHELF:
        found = _module_file(name)  # without an import: an unknown module must not run
        if found not in (ROOT / f"{name}.py", ROOT / name / "__init__.py"):
            raise RegisterError(
                f"The module {name!r} was found at {found or 'no place on sys.path'}. It must come "
                f"from {ROOT}, where register.py is. Run the entry file as a file "
                f"(python {ROOT / 'train_pp.py'} ..., without -m, -P or PYTHONSAFEPATH), or rename "
                f"the other {name!r}."
            )
        importlib.import_module(name)


def _module_file(name: str) -> Path | None:
    """Return the file of a top-level module, imported or not; None if there is none."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        file = spec.origin if spec is not None else None
    return Path(file).resolve() if file else None


def import_parts(specs: Iterable[str]) -> list[ModuleType]:
    """Import the parts of a user, one module a spec.

    Args:
        specs: a path ending in `.py`, the name of an entry point of the group `stageline.parts`,
            or a dotted module name.

    Raises:
        RegisterError: the file is missing, its stem is taken, or it fails while it is imported.
    """
    return [_import_one(spec) for spec in specs]


def _import_one(spec: str) -> ModuleType:
    load: Callable[[], Any] = functools.partial(importlib.import_module, spec)
    if spec.endswith(".py"):
        path = Path(spec).expanduser().resolve()
        spec, stem = str(path), path.stem
        if not path.is_file():
            raise RegisterError(
                f"--import {path}: there is no such file. Check the path; it is relative to the "
                f"directory you are in ({Path.cwd()})."
            )
        home = _module_file(stem) if stem.isidentifier() else None
        is_taken = home != path and (home is not None or stem in sys.modules)
        if is_taken or not stem.isidentifier():
            taken = f"already the module {home or '(built in)'}"
            name = re.sub(r"\W", "_", stem)
            raise RegisterError(
                f"--import {path}: {stem!r} is {taken if is_taken else 'no Python name'}. Rename "
                f"the file, for example to my_{name}.py: it is imported under its stem."
            )
        if str(path.parent) not in sys.path:
            # spawned workers need it; it is last, so that it hides no module
            sys.path.append(str(path.parent))
        importlib.invalidate_caches()
        load = functools.partial(importlib.import_module, stem)
    else:
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=spec):
            load = entry_point.load
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise RegisterError(
            f"--import {spec} does not import: {type(error).__name__}: {error}\n"
            f"  at {_place_of(error)}\n"
            f"  Correct that line, or try `python -c 'import ...'` on it first."
        ) from error


def _place_of(error: BaseException) -> str:
    """Return `file:line` where an import failed, without frames of the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    machinery = (str(Path(__file__).resolve()), "<frozen", str(Path(importlib.__file__).parent))
    places = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(machinery)
    ]
    return places[-1] if places else "no line of it: it was not found"
