"""Registries: every component of an experiment has a key here. Standard library only.

A component is registered by a decorator or by item assignment, and chosen by its key:

    @loss_fn_register("sft", "cross_entropy")
    def sft(logits_BTV, micro_batch, *, num_targets): ...

    prompt_register["vqa"] = "[IMAGE]\\n[QUESTION]\\n[ANSWER]"

Facts that a run needs in addition to the signature are arguments of the decorator:

    @loss_fn_register("rm", predicts_tokens=False)

Entry files load the shipped components with `import_shelf()` and those of a user with
`import_parts()`. No key is named here.
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
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, dataclass_transform

ROOT = Path(__file__).resolve().parent
SHELF = (
    *("models", "train_model", "prompt", "prompt_fn", "dataset", "loss_fn", "optimizer"),
    *("metric", "tracker", "corpus_parts"),
)
ENTRY_POINT_GROUP = "stageline.parts"


def did_you_mean(word: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """Return a sentence that names the known words like a misspelt one; empty for none."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(show, near))}?" if near else ""


class RegisterError(ValueError):
    """A wrong key, a key given twice, or a module of parts that cannot be imported."""

    exit_code = 2

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnknownKeyError(RegisterError, KeyError):
    """A name without a component. A `KeyError` too, so that `get()` and `pop()` work."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class FrozenClass:
    """Base of classes that are frozen dataclasses with keyword arguments."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Facts(FrozenClass):
    """Facts of a component that a run needs in addition to its signature."""

    without_effect: tuple[str, ...] = ()  # options that change no result, only speed or place
    # {"loss_fn": "rm"}: keys of other registers that suit a model or a collate_fn part
    default_keys: Mapping[str, str] = field(default_factory=dict)


class ModelFacts(Facts):
    for_generation: bool = True  # False: the whole text is rendered, with its end


class TrainModelFacts(Facts):
    gives_scores: bool = False  # a score for each token in place of logits
    model_types: tuple[str, ...] = ()  # accepted model_type values; empty: any


class BuilderFacts(Facts):
    plan: Callable[..., str] | None = None  # (the part's arguments) -> what --plan prints


class PromptFnFacts(Facts):
    prepare: Callable[..., object] | None = None  # (processor, **own options), before any row


class CollateFacts(Facts):
    needs_groups: bool = False  # the samples of a group are compared
    takes_tokens: bool = False  # samples may be token ids in place of text
    gives_prompts: bool = False  # rows end where an answer begins


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
    needs_teacher: bool = False  # micro_batch["loss_teacher"] of another model is read
    weighs_by_itself: bool = False  # it need not add up over micro-batches
    reads_by_token: bool = False  # --logits-chunk gives it ChunkedLogits, for policy_loss.py
    samples_answers: bool = False  # the model answers before each step, for rewards


class RewardFacts(Facts):
    takes_lots: bool = False  # it need not see all answers of a step together
    is_dear: bool = False  # a check does not call it


class OptimizerFacts(Facts):
    needs_whole: bool = False  # it needs whole matrices, so --dp-shard is refused


class EngineFacts(Facts):
    topology: Callable[..., Any] | None = None  # the options -> its stages and ranks


class DocumentFacts(Facts):
    columns_of: Callable[..., list[str]] | None = None  # own options -> the fields read of a row


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


@dataclass(eq=False, repr=False)
class Register(UserDict[str, Any]):
    """Maps keys to parts. Refuses a key that is taken, and knows where each part was registered.

    `data` holds an `Entry` for each key; `register[key]` is the part itself.
    """

    name: str  # name of the parts, `loss_fn`, and of the option, `--loss-fn`
    holds: str = ""  # one line saying what a part does; shown by `--list`
    # how the run calls a part, `part(rows, *, path, [step], **own)`: arguments in brackets where
    # it takes them; options of the run that go to it by name may be left out
    contract: str = "part()"
    _: KW_ONLY
    part_type: Any = callable  # or the type that each part has
    option: str = ""  # the option that takes a key, where it is not the name
    facts: type[Facts] = Facts  # the class of what a run has to know of a part
    takes_several: bool = False  # the option takes a,b, and options are those of one of them
    data: dict[str, Entry] = field(default_factory=dict)
    is_frozen: bool = False  # later additions, replacements and removals are refused

    def __post_init__(self) -> None:
        self.option = self.option or "--" + self.name.replace("_", "-")

    def __call__(self, *keys: str, replace: bool = False, **facts: Any) -> Callable:
        """Decorate a function or class to register it under one or more keys, unchanged."""
        if not keys or not all(isinstance(key, str) for key in keys):
            raise RegisterError(f"Write @{self.name}_register('my_key'), with the key as a string.")

        def decorate(part: Any) -> Any:
            for key in keys:
                self.register(key, part, replace=replace, **facts)
            return part

        return decorate

    def register(self, key: str, part: Any, *, replace: bool = False, **facts: Any) -> None:
        """Register a part; with `replace=True` also when the key is taken."""
        home = _caller_home()
        self._refuse_if_frozen(key)
        is_callable = self.part_type is callable
        if not (callable(part) if is_callable else isinstance(part, self.part_type)):
            wanted = getattr(self.part_type, "__name__", self.part_type)
            raise RegisterError(
                f"{self.name}_register[{key!r}] got a {type(part).__name__} at {home}. Register "
                f"a {wanted!r}: {self.holds or 'see register.py'}."
            )
        known = sorted(item.name for item in dataclasses.fields(self.facts))
        for fact in facts.keys() - set(known):
            raise RegisterError(
                f"{self.name}_register[{key!r}] has the unknown fact {fact}={facts[fact]!r} at "
                f"{home}.{did_you_mean(fact, known, str)} Known are: {', '.join(known)} "
                "(docs/add_a_part.md)."
            )
        if key in self.data and not replace:
            raise RegisterError(
                f"{self.name}_register[{key!r}] is registered twice: first at "
                f"{self.data[key].home}, again at {home}. Choose another key, or say replace=True "
                "at the second one."
            )
        self.data[key] = Entry(key, part, home, self.facts(**facts))

    def __setitem__(self, key: str, part: Any) -> None:
        self.register(key, part)

    def __getitem__(self, key: str) -> Any:
        return self.entry(key).part

    def __delitem__(self, key: str) -> None:
        self._refuse_if_frozen(key)
        del self.data[self.entry(key).key]  # an unknown key gets the error with suggestions

    def entry(self, key: str, *, option: str | None = None) -> Entry:
        """Return what is known of `key`.

        Args:
            option: the option that asked, for the error message; by default the register's own.

        Raises:
            UnknownKeyError: names the option, the nearest keys and all keys.
        """
        if key in self.data:
            return self.data[key]
        known = sorted(self.data)
        raise UnknownKeyError(
            f"{option or self.option} {key}: there is no {self.name} {key!r}."
            f"{did_you_mean(str(key).lower(), known)} Choose one of: {', '.join(known) or '(none)'}"
            f" (see `stageline list`), or add one: `from register import {self.name}_register` in "
            "a file of yours, and --import FILE.py."
        )

    def summary(self, key: str) -> str:
        """Return the first line of a component's docstring, or a string on one line."""
        part = self[key]
        if self.part_type is str:
            return part.replace("\n", "\\n")
        while isinstance(part, functools.partial) and "__doc__" not in vars(part):
            part = part.func
        lines = (inspect.getdoc(part) or "").strip().splitlines()
        return lines[0] if lines else "(no docstring)"

    @property
    def handed(self) -> tuple[int, frozenset[str]]:
        """The number of positional arguments in the contract, and the names of its others."""
        arguments = re.sub(r"\*\*\w+", "", self.contract).removeprefix("part")
        positional, _, others = arguments.partition("*")
        return len(re.findall(r"\w+", positional)), frozenset(re.findall(r"\w+", others))

    def _refuse_if_frozen(self, key: object) -> None:
        if self.is_frozen:
            raise RegisterError(
                f"{self.name}_register was changed (key {key!r}) at {_caller_home()} after it was "
                f"frozen. Register parts at the top level of a file given with --import."
            )


def _caller_home() -> str:
    """Return `file:line` that registers a component."""
    frame = sys._getframe(1)
    ours = {__name__, "_collections_abc", "collections.abc"}
    while frame.f_back is not None and frame.f_globals.get("__name__") in ours:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# docs/add_a_part.md explains these contracts.
model_register = Register(
    "model",
    "model task: generates texts, or scores them, from images and prompts",
    "part(model, processor, *, images, prompts, [samples, batch_size], **own)",
    facts=ModelFacts,
)
train_model_register = Register(
    "train_model",
    "architecture, built stage by stage from a config and a checkpoint",
    "part(*, config_path, processor_path, checkpoint_path, stage, num_stages, dtype, "
    "[model_types, new_rows, lora_taken_from], **model_kwargs)",
    facts=TrainModelFacts,
)
builder_register = Register(
    "builder",
    "loader of a whole model with its processor, from a folder or a server",
    "part(model_path, *, dtype, adapter_path, adapter_weights, placement, **own)",
    facts=BuilderFacts,
)
prompt_register = Register(
    "prompt", "prompt template, a text with [PLACEHOLDERS] for fields", part_type=str
)
prompt_fn_register = Register(
    "prompt_fn",
    "filler of a prompt template with a sample, or chat formatter of its messages",
    "part(sample, prompt, *, processor, for_generation, [examples], **own)",
    facts=PromptFnFacts,
)
image_token_register = Register(
    "image_token",
    "image placeholder of a model, written into a rendered text",
    "part(rendered, images, *, processor)",
)
dataset_register = Register(
    "dataset",
    "map-style dataset; each item is images (or None) and a sample (dict)",
    "part(*, dataset_path, split, **own)",
)
collate_fn_register = Register(
    "collate_fn",
    "collator of samples into the tensors of a micro-batch",
    "part(samples, *, prompt, prompt_fn, image_token, processor, pad_token_id, max_token_num, "
    "stage, num_stages, [pad_to_multiple_of], **own)",
    facts=CollateFacts,
)
loss_fn_register = Register(
    "loss_fn",
    "loss of the logits of a micro-batch, divided by the targets of the step",
    "part(logits_BTV, micro_batch, *, num_targets, [step, sim_fn], **own)",
    facts=LossFacts,
)
sim_fn_register = Register(
    "sim_fn", "similarity of two batches of vectors", "part(a_NV, b_NV, **own)"
)
reward_register = Register(
    "reward",
    "reward function, a number (or None) for each completion; several: a,b",
    "part(prompts, completions, samples, **own)",
    facts=RewardFacts,
    takes_several=True,
)
environment_register = Register(
    "environment",
    "answers a model's turns: reset(sample), step(completion) -> messages, reward, done",
    "part(**own), with reset(sample) -> messages and step(completion) -> (messages, reward, done)",
)
metric_register = Register(
    "metric", "scores of predictions against their samples", "part(predictions, samples, **own)"
)
optimizer_register = Register(
    "optimizer",
    "torch optimizer of parameter groups",
    "part(param_groups, *, learning_rate, weight_decay, **own)",
    facts=OptimizerFacts,
)
lr_scheduler_register = Register(
    "lr_scheduler",
    "learning rate of each step, a function of the step",
    "part(*, learning_rate, min_lr, warmup_steps, warmup_start_lr, total_steps, **own)",
)
tracker_register = Register(
    "tracker",
    "experiment tracker that gets the metrics of each step and evaluation",
    "part(*, folder, config, start_step, **own)",
)
engine_register = Register(
    "engine",
    "training backend: pipeline, streaming, ...",
    "part(config, data)",
    facts=EngineFacts,
)
document_register = Register(
    "document",
    "document text of a row of a text file",
    "part(row, **own)",
    facts=DocumentFacts,
)
splitter_register = Register(
    "splitter",
    "sentence splitter of a text, with the ends in characters",
    "part(text, **own)",
    option="--language",
    facts=SplitterFacts,
)

ALL_REGISTERS: dict[str, Register] = {
    one.name: one for one in list(vars().values()) if isinstance(one, Register)
}


def import_shelf(*names: str) -> None:
    """Import modules of `SHELF`, by default all, which must be the ones next to this file."""
    for name in names or SHELF:
        spec = importlib.util.find_spec(name)  # no import: an unknown module must not run
        found = Path(spec.origin or "").resolve() if spec is not None else None
        if found not in (ROOT / f"{name}.py", ROOT / name / "__init__.py"):
            raise RegisterError(
                f"The module {name!r} was found at {found or 'no place on sys.path'}, not in "
                f"{ROOT}. Run {ROOT / 'train_pp.py'} as a file, or rename the other {name!r}."
            )
        importlib.import_module(name)


def import_parts(specs: Iterable[str]) -> list[ModuleType]:
    """Import the parts of a user, one module a spec.

    A spec is a path ending in `.py`, the name of an entry point of the group `stageline.parts`, or
    a dotted module name.
    """
    return [_import_one(spec) for spec in specs]


def _import_one(spec: str) -> ModuleType:
    path = Path(spec).expanduser().resolve() if spec.endswith(".py") else None
    name = spec
    if path is not None:
        if not path.is_file():
            raise RegisterError(
                f"--import {path}: there is no such file. Correct the path ({Path.cwd()} is here)."
            )
        name = path.stem
        if str(path.parent) not in sys.path:
            # spawned workers need it; it is last, so that it hides no module
            sys.path.append(str(path.parent))
        importlib.invalidate_caches()
    try:
        plugins = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        for entry_point in plugins if path is None else ():
            return entry_point.load()
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        machinery = (__file__, "<frozen", str(Path(importlib.__file__).parent))
        frames = traceback.extract_tb(error.__traceback__)
        places = [one for one in frames if not one.filename.startswith(machinery)]
        at = f"\n  at {places[-1].filename}:{places[-1].lineno}" if places else ""
        raise RegisterError(
            f"--import {spec} does not import: {type(error).__name__}: {error}{at}\n"
            "  Correct that line, or try `python -c 'import ...'` on it first."
        ) from error
    home = getattr(module, "__file__", None)
    if path is not None and (home is None or Path(home).resolve() != path):
        raise RegisterError(
            f"--import {path}: {name!r} is already the module {home or '(built in)'}. Rename the "
            f"file, for example to my_{name}.py: it is imported under its stem."
        )
    return module
