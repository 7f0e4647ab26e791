"""Checks of a split on a scaled-down copy of its model: training, packed rows, decoding.

A copy has the user's own multipliers, flags and kinds of layers (`stageline/shrink.py`) and random
weights; its stages are compared with the whole copy. Each copy has one small record of what was
checked, named by a hash of everything the checks depend on: the scaled-down configuration, the
layers of each stage, the `train_model` part and its options, the versions of torch and
transformers, and the code that splits and decodes. A check that is on record builds nothing.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline import progress
from stageline.cache_trial import randomise
from stageline.checkpoint.load import quiet
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError
from stageline.model_folder import attention_options, called_alike, find_folder, load_config
from stageline.pipeline.topology import stage_layers
from stageline.shrink import layer_period, shrink_config
from stageline.stages.packing import check_packing
from stageline.verify.batches import draw_ids
from stageline.verify.whole_model import library_class, save_config

VerifyMode = Literal["auto", "always", "never"]
# files of the package that determine a split
CODE = (
    *("stages/*.py", "verify/*.py", "modules/pass_through.py", "inference/decoding/*.py"),
    *("shrink.py", "cache_trial.py"),
)
VERSIONS = ("torch", "transformers")
MOST_STAGES = 4  # number of stages that a copy has at most
PACKED = 19  # tokens of a sample: above each window of a copy, not a multiple of one


class WrongSplit(Exception):
    """The stages of a copy do not compute what the whole copy computes."""


@dataclass(frozen=True)
class ScaledCopy:
    """A split of a model, and the scaled-down copy that it is checked on.

    Attributes:
        part: a train_model part.
        config_path: None: the part will say what is missing.
        partition: layers of each stage after those of a vision tower; None: as even as possible.
        vision_stages: stages of a vision tower.
        gives_scores: scores in place of logits, which no class of transformers gives.
        options: what the part is told besides where the model is and which stage it makes.
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
    def function(self) -> Callable[..., Any]:
        """The part without the arguments that its key brings."""
        return self.part.func if isinstance(self.part, functools.partial) else self.part

    @property
    def is_ours(self) -> bool:
        """Whether the part is shipped; a user's may differ from transformers on purpose."""
        return self.function.__module__ == "train_model" and not hasattr(self.function, "__self__")

    @property
    def name(self) -> str:
        owner = getattr(self.function, "__self__", self.function)
        return getattr(owner, "__qualname__", type(owner).__name__)

    def scaled_down(self) -> tuple[PretrainedConfig, list[int]]:
        """The configuration of the copy, and the layers of its stages."""
        config = load_config(str(self.config_path), trust_remote_code=self.trust_remote_code)
        text = config.get_text_config(decoder=True)
        layers = stage_layers(
            list(self.partition) if self.partition is not None else None,
            num_layers=text.num_hidden_layers,
            num_stages=self.num_stages,
            vision_stages=self.vision_stages,
            visual_gpu_ratio=self.visual_gpu_ratio,
        )
        partition = tiny_partition(layers[self.vision_stages :], layer_period(config))
        small = shrink_config(config, num_layers=sum(partition))
        for name in ("output_router_logits", "router_aux_loss_coef"):
            if self.options.get(name) is not None:  # the whole model needs it too
                setattr(small.get_text_config(decoder=True), name, self.options[name])
        return small, partition

    def library_class(self, small: PretrainedConfig) -> Any:
        """Return the transformers Auto class for the whole copy; None if there is none."""
        if self.gives_scores:
            return None
        return library_class(small, trust_remote_code=self.trust_remote_code)

    def library_model(self, small: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
        """The whole copy as transformers has it, with the attention of the run."""
        told = {"trust_remote_code": self.trust_remote_code, "dtype": dtype}
        told |= attention_options(small, self.options.get("attn_implementation"))
        model: nn.Module = called_alike(self.library_class(small).from_config(small, **told))
        return model

    def facts(self, small: PretrainedConfig, partition: Sequence[int]) -> dict[str, Any]:
        """Return all that a check depends on, for JSON; code by its hash, the part's too."""
        package, owner = Path(__file__).parents[1], getattr(self.function, "__self__", None)
        files = {file for pattern in CODE for file in package.glob(pattern)}
        if self.trust_remote_code and self.config_path:
            files |= set(find_folder(self.config_path).glob("*.py"))
        one: Any
        for one in (self.function, *(owner.__mro__ if isinstance(owner, type) else ())):
            with contextlib.suppress(TypeError):  # it has no file
                home = Path(inspect.getsourcefile(inspect.unwrap(one)) or "")
                if home.is_file() and "site-packages" not in home.parts:
                    files.add(home)
        code = hashlib.sha256()
        for file in sorted(files):
            code.update(file.name.encode() + b"\0" + file.read_bytes())
        told = small.to_dict()
        for name in ("_name_or_path", "transformers_version"):
            told.pop(name, None)
        return {
            "config": json.loads(json.dumps(told, default=str)),
            "partition": list(partition),
            "vision_stages": self.vision_stages,
            "part": self.name,
            "options": {name: str(value) for name, value in sorted(self.options.items())},
            "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
            "code": code.hexdigest(),
        }

    @contextlib.contextmanager
    def stages(
        self,
        small: PretrainedConfig,
        partition: Sequence[int] | None = None,
        vision_stages: int = 0,
    ) -> Iterator[Callable[..., Any]]:
        """While open: (stage, number of stages, dtype) -> a stage of the copy, on the CPU."""
        with quiet(), tempfile.TemporaryDirectory() as name, torch.random.fork_rng(devices=[]):
            save_config(small, str(self.config_path), Path(name))

            def build(stage: int, count: int, dtype: torch.dtype, **changes: Any) -> nn.Module:
                is_whole, options = count == 1, dict(self.options)
                if vision_stages and not is_whole:
                    options["vision_stages"] = vision_stages
                options |= {
                    "config_path": name,
                    "processor_path": None,
                    "checkpoint_path": None,
                    "stage": stage,
                    "num_stages": count,
                    "partition": None if is_whole else partition,
                    "dtype": dtype,
                    "device": "cpu",
                    "is_piece": True,
                    "trust_remote_code": self.trust_remote_code,
                }
                return self.part(**{**options, **changes})[0]

            yield build


@torch.no_grad()
def copy_weights(whole: nn.Module, stages: Sequence[Any]) -> None:
    """Gives stages the weights of the whole model, by name."""
    values: dict[str, torch.Tensor] = dict(whole.named_parameters(remove_duplicate=False))
    values |= dict(whole.named_buffers(remove_duplicate=False))
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.copy_(values[name])
            parameter.requires_grad_(parameter.is_floating_point())
        for name, buffer in stage.named_buffers():
            if name in values and values[name].shape == buffer.shape:
                buffer.copy_(values[name])


def tiny_partition(real: Sequence[int], period: int) -> list[int]:
    """Return the layers of few stages whose borders are at the same places of the layers' pattern.

    If there are more stages than `MOST_STAGES`, takes the first borders and the last one.

    Args:
        real: layers of each stage of the run.
        period: after how many layers their kinds begin again.
    """
    borders = [sum(real[: stage + 1]) for stage in range(len(real) - 1)]
    if len(borders) > MOST_STAGES - 1:
        borders = [*borders[: MOST_STAGES - 2], borders[-1]]
    places = [number * period + ((at - 1) % period + 1) for number, at in enumerate(borders)]
    total = (len(borders) + 1) * period
    return [end - start for start, end in zip([0, *places], [*places, total])]


def shown(small: PretrainedConfig, partition: Sequence[int]) -> str:
    """The copy in words."""
    width = getattr(small.get_text_config(decoder=True), "hidden_size", None)
    wide = f" of width {width}" if width else ""
    layers = f"{sum(partition)} layers{wide} on {len(partition)} stages"
    return f"{small.model_type}, scaled down to {layers}"


Checked = tuple[str, dict[str, Any]]  # a sentence for the log, numbers for the record
Check = Callable[[ScaledCopy, PretrainedConfig, list[int]], Checked]  # takes partition, too


def packed_rows(
    copy: ScaledCopy, small: PretrainedConfig, partition: list[int], *, rows: int
) -> Checked:
    """Check that packed samples, longer than each window of the copy, do not see each other.

    Each stage of a run checks itself on a few tokens (`check_packing`), which are fewer than a
    window, a chunk or an index of the real model holds.

    Args:
        rows: of a micro-batch.
    """
    with copy.stages(small) as build:
        whole = build(0, 1, torch.float32)
    randomise(whole)
    try:
        check_packing(whole, rows=rows, ids_N=draw_ids(small, 2 * PACKED))
    except UserError as error:
        raise WrongSplit(str(error)) from error
    return "", {"rows": rows}


def verify(
    copy: ScaledCopy,
    checks: Mapping[str, Check],
    *,
    mode: Literal["auto", "always"],
    ranks: Ranks,
    say: Callable[[str], None],
) -> None:
    """Run the checks of a split that are not on record yet, on rank 0; all ranks call this.

    Args:
        checks: the words for a check, which are its name on record -> the check.
        mode: auto: those that are not on record; always: all of them.
        say: prints a line, on the first rank.

    Raises:
        UserError: the stages compute something else than the whole model.
    """

    def note(what: str, error: Exception) -> None:
        text = " ".join(str(error).split())
        say(f"note: {what} not compared with the whole model on a scaled-down copy: {text[:400]}")

    def run() -> None:
        try:
            small, partition = copy.scaled_down()
            facts = copy.facts(small, partition)
        except Exception as error:
            # a mistake in the model's folder is reported where it is read
            if copy.config_path and Path(copy.config_path).exists():
                note(" and ".join(checks), error)
            return
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = Path(os.environ.get("STAGELINE_CACHE") or f"{home}/stageline").expanduser()
        record = cache / "verified" / f"{key}.json"
        known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known |= json.loads(record.read_bytes())["checks"]
        for name, check in checks.items():
            if mode == "auto" and name in known:
                continue
            started = time.perf_counter()
            try:
                with progress.doing(f"check of {name}"):
                    told, known[name] = check(copy, small, partition)
            except WrongSplit as error:
                raise UserError(str(error)) from error
            except Exception as error:  # a copy that cannot be built, run, saved or read again
                note(name, error)
                continue
            kept = {"copy": shown(small, partition), "facts": facts, "checks": known}
            with contextlib.suppress(OSError):  # without a record the next run checks again
                record.parent.mkdir(parents=True, exist_ok=True)
                record.write_text(json.dumps(kept, indent=1) + "\n")
            if told:
                seconds = f"{time.perf_counter() - started:.1f} s"
                say(f"split check: {told}; {seconds}, recorded for this model and split")

    ranks.on_first(run)
