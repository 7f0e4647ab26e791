"""The proof at the start of a run: asked for, made once, and kept for the next run.

What was proven lies in one small file each, under a name made of all that it depends on: the
cut-down configuration, the layers of each stage, the part and its options, the versions of torch
and transformers, and the code that splits. A file that is there builds nothing.
"""

import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline import progress
from stageline.checking.batches import probe_batches
from stageline.checking.proof import (
    CannotRun,
    Proof,
    compare_with_whole,
    shown,
    tiny_partition,
)
from stageline.checking.setup import has_images, library_class, save_config
from stageline.checking.shrink import layer_period, shrink_config
from stageline.checkpoint.layout import Ranks
from stageline.checkpoint.load import quiet
from stageline.errors import UserError, spelled
from stageline.model_folder import load_config
from stageline.pipeline.stage_passes import MicroBatch
from stageline.pipeline.topology import stage_layers

ProveMode = Literal["auto", "always", "never"]
MODE = "STAGELINE_PROVE_SPLIT"  # stands for auto: never, where many short runs start
CACHE = "STAGELINE_CACHE"  # the folder for what can be made again; default: ~/.cache/stageline
# what a split is made of; below the folder of the package, or beside it
CODE = ("stages/*.py", "checking/*.py", "modules/pass_through.py")
VERSIONS = ("torch", "transformers")
MOST_WEIGHTS = 20_000_000  # of a copy; a user's own configuration may not have become small


@dataclass(frozen=True)
class SplitToProve:
    """How a run splits its model.

    Attributes:
        part: a train_model part.
        options: what it is told besides where the model is and which stage it makes.
        config_path: None: the part will say what is missing.
        partition: layers of each stage behind those of a tower; None: as even as can be.
        vision_stages: stages of a tower.
        gives_scores: scores in the place of logits, which no class of the library gives.
    """

    part: Callable[..., tuple[Any, Any, int]]
    config_path: str | None
    num_stages: int
    partition: Sequence[int] | None = None
    visual_gpu_ratio: float = 0.0
    vision_stages: int = 0
    trust_remote_code: bool = False
    gives_scores: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        owner = getattr(self.part, "__self__", self.part)
        return getattr(owner, "__qualname__", type(owner).__name__)


def options_of_proof(kwargs: Mapping[str, Any], attention: str | None) -> dict[str, Any]:
    """What a part is told in a proof, of its own options and the attention of the run.

    On the CPU: what needs a GPU computes what sdpa does.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    found = attention or options.pop("attn_implementation", None)
    if found in ("eager", "sdpa"):
        options["attn_implementation"] = found
    return options


def prove_split(
    split: SplitToProve, *, mode: ProveMode, ranks: Ranks, say: Callable[[str], None]
) -> None:
    """Compares a cut-down copy, split and whole, unless that was done before; all ranks call this.

    Args:
        mode: auto: where nothing is recorded; always; never.
        say: prints a line, on the first rank.

    Raises:
        UserError: they differ; says where, and what usually makes it.
    """
    if split.num_stages == 1:
        return
    if mode == "auto" and os.environ.get(MODE) == "never":
        mode = "never"
    if mode == "never":
        if ranks.rank == 0:
            say(
                spelled(
                    "WARNING: `prove_split` never: nobody has compared this split with the whole "
                    "model on this machine; if it computes something else, nothing will say so"
                )
            )
        return

    def prove() -> None:
        if ranks.rank == 0:
            with progress.doing("proof of the split"):
                _prove(split, mode, say)

    ranks.together(prove)


def _prove(split: SplitToProve, mode: ProveMode, say: Callable[[str], None]) -> None:
    try:
        config = load_config(str(split.config_path), trust_remote_code=split.trust_remote_code)
        layers = _layers(split, config)
        period = layer_period(config)
        partition = tiny_partition(layers, period)
        small = shrink_config(config, num_layers=sum(partition))
        _tell_routers(small, split.options)
    except Exception as error:
        # what is wrong with the model's folder is said where it is read
        if split.config_path and Path(split.config_path).exists():
            _say_unproven(error, say)
        return
    facts = _facts(split, small, partition)
    record = cache_folder() / "proofs" / f"{_name_of(facts)}.json"
    if mode == "auto" and _is_proven(record):
        return
    started = time.perf_counter()
    try:
        proof, reference = _compare(split, config, small, partition)
    except Exception as error:  # CannotRun, or a copy that cannot be saved, or read again
        _say_unproven(error, say)
        return
    seconds = time.perf_counter() - started
    what = f"{small.model_type}, cut down to {shown(small, partition)}"
    if not proof.is_equal:
        raise _refusal(split, small, partition, proof, reference)
    _write(record, {"model": what, "reference": reference, "loss": proof.loss, "facts": facts,
                    "gradient": proof.gradient, "dtype": proof.dtype})  # fmt: skip
    say(
        f"the split of {what}, equals {reference} in loss ({_apart(proof.loss)}) and every "
        f"gradient ({_apart(proof.gradient)}): {seconds:.1f} s, recorded"
    )


def _apart(share: float) -> str:
    return "to the bit" if share == 0 else f"within {share:.0e} of the largest"


def _say_unproven(error: Exception, say: Callable[[str], None]) -> None:
    text = " ".join(str(error).split())
    say(f"note: this split was not compared with the whole model on a cut-down copy: {text[:400]}")


def _layers(split: SplitToProve, config: PretrainedConfig) -> list[int]:
    text = config.get_text_config(decoder=True)
    layers = stage_layers(
        list(split.partition) if split.partition is not None else None,
        num_layers=text.num_hidden_layers,
        num_stages=split.num_stages,
        vision_stages=split.vision_stages,
        visual_gpu_ratio=split.visual_gpu_ratio,
    )
    return layers[split.vision_stages :]


def _tell_routers(small: PretrainedConfig, options: Mapping[str, Any]) -> None:
    """Options about the routers of a mixture of experts, to the whole model as well."""
    for name in ("output_router_logits", "router_aux_loss_coef"):
        if options.get(name) is not None:
            setattr(small.get_text_config(decoder=True), name, options[name])


# -- the comparison ----------------------------------------------------------------------------


def _compare(
    split: SplitToProve, config: PretrainedConfig, small: PretrainedConfig, partition: list[int]
) -> tuple[Proof, str]:
    """The proof, and what the stages were compared with."""
    vision_stages = min(split.vision_stages, 2)  # the tower has few blocks, too
    num_stages = vision_stages + len(partition)
    with quiet(), tempfile.TemporaryDirectory() as name, torch.random.fork_rng(devices=[]):
        save_config(small, str(split.config_path), Path(name))

        def build(stage: int, count: int, dtype: torch.dtype, **changes: Any) -> nn.Module:
            alone = count == 1
            options = dict(split.options)
            if vision_stages and not alone:
                options["vision_stages"] = vision_stages
            fixed = {
                "config_path": name,
                "processor_path": None,
                "checkpoint_path": None,
                "stage": stage,
                "num_stages": count,
                "partition": None if alone else partition,
                "dtype": dtype,
                "device": "cpu",
                "is_piece": True,
                "trust_remote_code": split.trust_remote_code,
            }
            return split.part(**{**options, **fixed, **changes})[0]

        compare = functools.partial(
            compare_with_whole,
            build,
            num_stages=num_stages,
            make_batches=functools.partial(example_batches, small),
        )
        auto_class = library_class(small, trust_remote_code=split.trust_remote_code)
        reference = f"{type(small).__name__.removesuffix('Config')} of transformers"
        if auto_class is None or split.gives_scores:
            _refuse_large(build)
            return _with_itself(compare, build)
        proof = compare(functools.partial(_library, split, auto_class, small))
        if not proof.is_equal and not _is_of_the_shelf(split.part):
            # a user's part may be meant to differ from the library's model
            with_itself, its_name = _with_itself(compare, build)
            if with_itself.is_equal:
                return with_itself, its_name
        return proof, reference


def example_batches(
    config: PretrainedConfig, whole: nn.Module, dtype: torch.dtype
) -> list[MicroBatch]:
    """Micro-batches of text, padded and full; with a tower also of many pictures, none and some."""
    return probe_batches(_library_of(whole), "vision" if has_images(config) else "text", dtype)


def _library_of(whole: nn.Module) -> nn.Module:
    return getattr(whole, "whole", None) or whole


def _with_itself(compare: Callable[..., Proof], build: Callable[..., Any]) -> tuple[Proof, str]:
    def whole(dtype: torch.dtype) -> nn.Module:
        return build(0, 1, dtype)

    return compare(whole, is_library=False), "the part on one stage"


def _library(
    split: SplitToProve, auto_class: Any, small: PretrainedConfig, dtype: torch.dtype
) -> nn.Module:
    options: dict[str, Any] = {"trust_remote_code": split.trust_remote_code}
    attention = split.options.get("attn_implementation")
    if attention:
        options["attn_implementation"] = attention
    return auto_class.from_config(small, dtype=dtype, **options)


def _refuse_large(build: Callable[..., Any]) -> None:
    try:
        outline = build(0, 1, torch.float32, device="meta")
    except Exception as error:
        raise CannotRun(f"the part builds no cut-down model: {error}") from error
    count = sum(parameter.numel() for parameter in outline.parameters())
    if count > MOST_WEIGHTS:
        raise CannotRun(f"its cut-down copy has {count} weights still")


def _is_of_the_shelf(part: Callable[..., Any]) -> bool:
    return part.__module__.partition(".")[0] == "pp_models" and not hasattr(part, "__self__")


def _refusal(
    split: SplitToProve,
    small: PretrainedConfig,
    partition: list[int],
    proof: Proof,
    reference: str,
) -> UserError:
    return UserError(
        f"the split of {small.model_type} by {split.name} does not compute what {reference} "
        f"computes: on a copy cut down to {shown(small, partition)} the loss is {proof.loss:.1e} "
        f"off and a gradient {proof.gradient:.1e} of the largest; {proof.place}. Equal numbers "
        f"were expected ({proof.dtype}), because such a run would train or answer with another "
        f"model without a word. The usual cause: {proof.cause}. Take another `train_model`, mend "
        "the stage model (docs/add_a_model.md; check_model.py compares in detail), or run on one "
        "stage; `prove_split` never runs it as it is."
    )


# -- the record --------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where this machine keeps what can be made again."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "stageline"


def _facts(
    split: SplitToProve, small: PretrainedConfig, partition: Sequence[int]
) -> dict[str, Any]:
    told = small.to_dict()
    config = {k: v for k, v in told.items() if k not in ("_name_or_path", "transformers_version")}
    return {
        "config": json.loads(json.dumps(config, default=str)),
        "partition": list(partition),
        "vision_stages": split.vision_stages,
        "part": split.name,
        "options": {name: str(value) for name, value in sorted(split.options.items())},
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "code": _code_of(split.part),
    }


def _name_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _code_of(part: Callable[..., Any]) -> str:
    """A sum of the code that splits: the engine's, the shelf's, and the part's own file."""
    package = Path(__file__).resolve().parents[1]
    files = {file for pattern in CODE for file in package.glob(pattern)}
    owner = getattr(part, "__self__", None)
    for one in (part, *(owner.__mro__ if isinstance(owner, type) else ())):
        home = _file_of(one)
        if home is not None and home.is_file() and "site-packages" not in home.parts:
            files.add(home)
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def _file_of(one: Any) -> Path | None:
    try:
        return Path(inspect.getsourcefile(inspect.unwrap(one)) or "")
    except TypeError:
        return None


def _is_proven(record: Path) -> bool:
    try:
        return "gradient" in json.loads(record.read_bytes())
    except (OSError, ValueError):
        return False


def _write(record: Path, content: Mapping[str, Any]) -> None:
    """A record that cannot be kept costs the next run some seconds, and nothing else."""
    draft = record.with_name(f"{record.name}.{secrets.token_hex(4)}")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(draft, record)
    except OSError:
        draft.unlink(missing_ok=True)
