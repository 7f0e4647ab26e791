"""Proves on a cut-down copy of a model that its stages compute what the whole model computes.

Loss and every gradient, in one process, in float64 where the model's operators know it. The copy
has the user's own multipliers, flags and kinds of layers, see shrink.py; its weights are random.
Where the first difference is, and what usually makes it, is part of the result.

A proof is made once, and kept in one small file, whose name is made of all that it depends on: the
cut-down configuration, the layers of each stage, the part and its options, the versions of torch
and transformers, and the code that splits. Where the file is there, nothing is built.

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline import progress
from stageline.cache_trial import randomise
from stageline.checking.batches import (
    Tensors,
    loss_of,
    ordinary_ids,
    probe_batches,
    run_chain,
    with_facts,
)
from stageline.checking.reference import (
    layers_behind_borders,
    on_hidden_states,
    run_library_model,
    run_stage_model,
)
from stageline.checking.setup import copies, copy_weights, has_images, library_class
from stageline.checkpoint.layout import Ranks
from stageline.errors import UserError
from stageline.model_folder import attention_options, called_alike, find_folder, load_config
from stageline.pipeline.stage_passes import MicroBatch, model_inputs
from stageline.pipeline.topology import stage_layers
from stageline.shrink import layer_period, shrink_config
from stageline.stages.discover import VERSIONS, cache_folder, keep_record
from stageline.stages.packing import check_packing

ProveMode = Literal["auto", "always", "never"]
# what a split is made of; below the folder of the package, or beside it
CODE = (
    *("stages/*.py", "checking/*.py", "modules/pass_through.py"),
    *("shrink.py", "family_configs.py", "cache_trial.py"),
)
UNPROVEN = "this split was not compared with the whole model"
MOST_STAGES = 4  # of a copy
MOST_WEIGHTS = 20_000_000  # of a copy; a user's own configuration may not have become small
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
PACKED = 19  # tokens of a sample: above each window of a copy, no multiple of one


class _LooksAhead(Exception):
    """The whole model is no decoder."""


@dataclass(frozen=True)
class Proof:
    """What a comparison found.

    Attributes:
        loss, gradient: greatest difference, as a share of the loss and of the largest gradient.
        place: the first thing that differs, in the order of the forward pass; "" where none does.
        cause: what usually makes it.
        dtype: in which both were computed.
    """

    loss: float
    gradient: float
    dtype: str
    place: str = ""
    cause: str = ""


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
    def is_ours(self) -> bool:
        """Whether the part is of the shelf; a user's may be meant to differ from the library's."""
        return self.part.__module__ == "pp_models" and not hasattr(self.part, "__self__")

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
    split: SplitToProve,
    *,
    mode: Literal["auto", "always"],
    ranks: Ranks,
    say: Callable[[str], None],
) -> None:
    """Compares a cut-down copy, split and whole, unless that was done before; all ranks call this.

    Args:
        mode: auto: where nothing is recorded; or always.
        say: prints a line, on the first rank.

    Raises:
        UserError: they differ; says where, and what usually makes it.
    """
    if split.num_stages == 1:
        return
    ranks.on_first(lambda: _prove(split, mode, say))


@progress.doing("proof of the split")
def _prove(split: SplitToProve, mode: str, say: Callable[[str], None]) -> None:
    try:
        small, partition = cut_down(split)
        _tell_routers(small, split.options)
    except Exception as error:
        # what is wrong with the model's folder is said where it is read
        if split.config_path and Path(split.config_path).exists():
            say_unproven(error, say)
        return
    facts = facts_of(split, small, partition)
    record = record_of(facts)
    if mode == "auto" and is_proven(record):
        return
    started = time.perf_counter()
    try:
        proof, reference = _compare(split, small, partition)
    except _LooksAhead as error:
        raise UserError(str(error)) from error
    except Exception as error:  # a copy that cannot run, that cannot be saved, or read again
        say_unproven(error, say)
        return
    what = f"{small.model_type}, cut down to {_shown(small, partition)}"
    if proof.place:
        raise _refusal(split, small, partition, proof, reference)
    numbers = {"loss": proof.loss, "gradient": proof.gradient, "dtype": proof.dtype}
    keep_record(record, {"model": what, "reference": reference, **numbers, "facts": facts})
    say(
        f"the split of {what}, equals {reference} in loss ({_within(proof.loss)}) and every "
        f"gradient ({_within(proof.gradient)}): {time.perf_counter() - started:.1f} s, recorded"
    )


@progress.doing("check of packed rows")
def prove_packing(split: SplitToProve, *, rows: int, say: Callable[[str], None]) -> None:
    """Refuses a model whose packed samples are apart only as long as they are short.

    A stage tries itself on a few tokens (packing.py), fewer than a window, a chunk or an index of
    the real model holds. A cut-down copy, whose own hold fewer still, reads longer samples here.

    Args:
        rows: of a micro-batch.

    Raises:
        UserError: a packed sample depends on another one.
    """
    try:
        config = load_config(str(split.config_path), trust_remote_code=split.trust_remote_code)
        small = shrink_config(config, num_layers=layer_period(config))
        with copies(split, small) as build:
            copy = build(0, 1, torch.float32)
        randomise(copy)
    except Exception as error:  # as of `_prove`
        say_unproven(error, say, "packed rows were not tried")
        return
    ids = ordinary_ids(small)
    drawn = torch.randint(len(ids), (2 * PACKED,), generator=torch.Generator().manual_seed(0))
    check_packing(copy, rows=rows, ids_N=ids[drawn])


def _within(share: float) -> str:
    return "to the bit" if share == 0 else f"within {share:.0e} of the largest"


def say_unproven(error: Exception, say: Callable[[str], None], what: str = UNPROVEN) -> None:
    """Notes that nothing was compared, and why."""
    text = " ".join(str(error).split())
    say(f"note: {what} on a cut-down copy: {text[:400]}")


def cut_down(split: SplitToProve) -> tuple[PretrainedConfig, list[int]]:
    """The configuration of a copy, and the layers of its stages."""
    config = load_config(str(split.config_path), trust_remote_code=split.trust_remote_code)
    partition = tiny_partition(_layers(split, config), layer_period(config))
    return shrink_config(config, num_layers=sum(partition)), partition


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


def tiny_partition(real: Sequence[int], period: int) -> list[int]:
    """Layers of few stages whose borders lie at the same places of the layers' pattern.

    Of more stages than `MOST_STAGES` these are the first ones, and the last.

    Args:
        real: layers of each stage of the run.
        period: after how many layers their kinds begin anew.
    """
    borders = [sum(real[: stage + 1]) for stage in range(len(real) - 1)]
    if len(borders) > MOST_STAGES - 1:
        borders = [*borders[: MOST_STAGES - 2], borders[-1]]
    places = [number * period + ((at - 1) % period + 1) for number, at in enumerate(borders)]
    total = (len(borders) + 1) * period
    return [end - start for start, end in zip([0, *places], [*places, total])]


def _shown(config: PretrainedConfig, partition: Sequence[int]) -> str:
    """The copy in words."""
    width = getattr(config.get_text_config(decoder=True), "hidden_size", "?")
    return f"{sum(partition)} layers of width {width} on {len(partition)} stages"


def _compare(
    split: SplitToProve, small: PretrainedConfig, partition: list[int]
) -> tuple[Proof, str]:
    """The proof, and what the stages were compared with."""
    vision_stages = min(split.vision_stages, 2)  # the tower has few blocks, too
    with copies(split, small, partition, vision_stages) as build:
        compare = functools.partial(
            _compare_with_whole,
            build,
            num_stages=vision_stages + len(partition),
            kind="vision" if has_images(small) else "text",
        )
        with_itself = functools.partial(compare, functools.partial(build, 0, 1), is_library=False)
        auto_class = library_class(small, trust_remote_code=split.trust_remote_code)
        reference = f"{type(small).__name__.removesuffix('Config')} of transformers"
        if auto_class is None or split.gives_scores:
            _refuse_large(build)
            return with_itself(), "the part on one stage"
        proof = compare(functools.partial(library_model, split, small, auto_class))
        if proof.place and not split.is_ours:
            own = with_itself()
            if not own.place:
                return own, "the part on one stage"
        return proof, reference


@torch.no_grad()
def _check_looks_back(whole: Any, batch: MicroBatch) -> None:
    """Refuses a model in which what comes before a token changes with it.

    The configuration of some tells so (`refuse_both_ways`); here the numbers do.
    """
    inputs = {name: value[:1] for name, value in model_inputs(batch).items()}
    ids_1T = inputs["input_ids"]
    changed_1T = ids_1T.clone()
    changed_1T[0, -1] = next(one for one in ordinary_ids(whole.config) if one != ids_1T[0, -1])
    whole.eval()
    before, after = (
        whole(**{**inputs, "input_ids": ids}, use_cache=False).logits[0, -ids_1T.shape[1] : -1]
        for ids in (ids_1T, changed_1T)
    )
    whole.train()
    if _apart(before, after, before.abs().max().item()) > TOLERANCES[torch.float32]:
        raise _LooksAhead(
            f"{type(whole).__name__} looks ahead: what it says of a token changes with those that "
            "follow. A decoder was expected, because a token that sees the next one learns nothing "
            "by predicting it, and has nothing to answer with. Choose another model."
        )


def library_model(
    split: SplitToProve, small: PretrainedConfig, auto_class: Any, dtype: torch.dtype
) -> nn.Module:
    """The whole cut-down copy as transformers has it, with the attention of the run."""
    told = {"trust_remote_code": split.trust_remote_code, "dtype": dtype}
    told |= attention_options(small, split.options.get("attn_implementation"))
    model: nn.Module = called_alike(auto_class.from_config(small, **told))
    return model


def _refuse_large(build: Callable[..., Any]) -> None:
    try:
        outline = build(0, 1, torch.float32, device="meta")
    except Exception as error:
        raise RuntimeError(f"the part builds no cut-down model: {error}") from error
    count = sum(parameter.numel() for parameter in outline.parameters())
    if count > MOST_WEIGHTS:
        raise RuntimeError(f"its cut-down copy has {count} weights still")


def _refusal(
    split: SplitToProve, small: PretrainedConfig, partition: list[int], proof: Proof, reference: str
) -> UserError:
    return UserError(
        f"the split of {small.model_type} by {split.name} does not compute what {reference} "
        f"computes: on a copy cut down to {_shown(small, partition)} the loss is {proof.loss:.1e} "
        f"off and a gradient {proof.gradient:.1e} of the largest; {proof.place}. Equal numbers "
        f"were expected ({proof.dtype}), because such a run would train or answer with another "
        f"model without a word. The usual cause: {proof.cause}. Take another `train_model`, mend "
        "the stage model (docs/add_a_model.md; check_model.py compares in detail), or run on one "
        "stage; `prove_split` never runs it as it is."
    )


@dataclass
class _Run:
    """What one of both sides computed.

    Attributes:
        borders: number of a border -> the hidden states [B, T, H] that cross it, of each batch.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    borders: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def drop_padding(self, batches: Sequence[MicroBatch]) -> None:
        """Makes zeros of hidden states of padding, which no loss reads: they need not be equal."""
        masks = [batch["attention_mask"][..., None].bool() for batch in batches]
        for border, hidden in self.borders.items():
            self.borders[border] = [
                one.masked_fill(~mask, 0.0) if one.shape[:2] == mask.shape[:2] else one
                for one, mask in zip(hidden, masks, strict=False)
            ]


def _compare_with_whole(
    build: Callable[..., Any],
    build_whole: Callable[[torch.dtype], nn.Module],
    *,
    num_stages: int,
    kind: str,
    is_library: bool = True,
) -> Proof:
    """Runs stages and whole model on the same batches with the same weights.

    Args:
        build: (stage, num_stages, dtype) -> a stage model on the CPU, whatever its weights are.
        build_whole: (dtype) -> the whole model on the CPU.
        kind: "vision" or "text": what the micro-batches hold.
        is_library: the whole model is transformers' own; else the part on one stage.

    Raises:
        RuntimeError: one of the two cannot be built or run.
    """
    for dtype in TOLERANCES:
        try:
            whole = build_whole(dtype).to(dtype).train()
            randomise(whole)
            batches = probe_batches(getattr(whole, "whole", None) or whole, kind, dtype)
            expected = _run_whole(whole, batches, {}, is_library=is_library)
            if not all(map(math.isfinite, expected.losses)):
                raise ArithmeticError("its loss is not a finite number")
            break
        except Exception as error:  # operators without float64, among all else
            if dtype is torch.float32:
                raise RuntimeError(f"the whole model: {_said(error)}") from error
    try:
        stages = [build(stage, num_stages, dtype).train() for stage in range(num_stages)]
        copy_weights(whole, stages)
        found = _run_stages(stages, batches)
    except Exception as error:
        raise RuntimeError(f"its stages: {_said(error)}") from error
    if kind == "text" and is_library:
        _check_looks_back(whole, batches[0])
    limit = TOLERANCES[dtype]
    loss = max(
        _apart(torch.tensor(one), torch.tensor(other), abs(other) or 1.0)
        for one, other in zip(found.losses, expected.losses, strict=True)
    )
    gaps = _gradient_gaps(found, expected)
    proof = Proof(loss, max(gaps.values(), default=0.0), str(dtype).removeprefix("torch."))
    if loss <= limit and proof.gradient <= limit:
        return proof
    layers = layers_behind_borders(whole, stages[0]) or {}
    expected = _run_whole(whole, batches, layers, is_library=is_library)
    for run in (found, expected):
        run.drop_padding(batches)
    place, cause = _find_place(
        found, expected, stages[0].partition, limit, is_loss_off=loss > limit
    )
    first = next((name for name, gap in gaps.items() if gap > limit), "no parameter")
    place += f"the first gradient that differs is that of {first}"
    return replace(proof, place=place, cause=cause)


def _run_whole(
    whole: nn.Module,
    batches: Sequence[MicroBatch],
    layers: Mapping[int, nn.Module],
    *,
    is_library: bool,
) -> _Run:
    """Args: layers: number of a border -> the first layer behind it, whose input is kept."""
    run = _Run()
    whole.zero_grad()
    forward = run_library_model if is_library else run_stage_model
    hooks = [
        on_hidden_states(layer, run.borders.setdefault(border, []).append)
        for border, layer in layers.items()
    ]
    for batch in batches:
        loss = loss_of(forward(whole, model_inputs(batch)), batch)
        loss.backward()
        run.losses.append(loss.item())
    for hook in hooks:
        hook.remove()
    run.gradients = _gradients(whole)
    return run


def _run_stages(stages: Sequence[Any], batches: Sequence[MicroBatch]) -> _Run:
    run = _Run()

    def watch(stage: int, sent: Tensors) -> None:
        run.borders.setdefault(stage, []).append(sent[0].detach().clone())

    told = with_facts(stages, batches)
    losses = run_chain(stages, told, loss_fn=loss_of, watch=watch)
    run.losses = [loss.item() for loss in losses]
    run.gradients = _gradients(*stages)
    return run


def _gradients(*models: nn.Module) -> dict[str, torch.Tensor]:
    """By name; of a weight on several stages their sum, as a step takes it."""
    found: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                found[name] = found[name] + grad if name in found else grad.clone()
    return found


def _gradient_gaps(found: _Run, expected: _Run) -> dict[str, float]:
    """Name of a parameter, in the model's order -> how far its gradients are apart."""
    scale = max((g.abs().max().item() for g in expected.gradients.values()), default=0.0) or 1.0
    return {
        name: _apart(found.gradients.get(name), expected.gradients.get(name), scale)
        for name in dict.fromkeys((*expected.gradients, *found.gradients))
    }


def _apart(one: torch.Tensor | None, other: torch.Tensor | None, scale: float) -> float:
    if one is None or other is None:
        there = other if one is None else one
        assert there is not None  # one of the two has it
        return there.abs().max().item() / scale
    if one.shape != other.shape:
        return float("inf")
    gap = (one.double() - other.double()).abs()
    gap = gap.masked_fill(one.isnan() & other.isnan(), 0.0)
    return float("inf") if gap.isnan().any() else gap.max().item() / scale


def _find_place(
    found: _Run, expected: _Run, partition: Sequence[int], limit: float, *, is_loss_off: bool
) -> tuple[str, str]:
    """The first border at which hidden states differ, in words, and what usually makes it."""
    for border in sorted(found.borders):
        pairs = list(zip(found.borders[border], expected.borders.get(border, [])))
        wrong = [pair for pair in pairs if _apart(*pair, pair[1].abs().max().item() or 1) > limit]
        if wrong:
            at = f"layer {sum(partition[: border + 1])} (stage {border} to {border + 1})"
            factor = _factor(*wrong[0])
            return f"the border before {at} is the first that differs{factor}, and ", _cause(border)
    if is_loss_off:
        last = len(partition) - 1
        return f"all borders are equal, stage {last} gives another loss, and ", _cause(last)
    cause = (
        "something that layers read besides the hidden states goes to later stages without its "
        "gradient, or a weight that several stages read is on one of them only"
    )
    return "all borders and the loss are equal; ", cause


def _factor(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """The number by which all of it is multiplied, where there is one."""
    factor = ((ours * theirs).sum() / theirs.square().sum()).item()
    off = (ours - factor * theirs).abs().max() / ours.abs().max()
    return f" (it is {factor:.4g} times as large)" if off < 1e-3 else ""


def _cause(stage: int) -> str:
    return (
        f"what the model's code does before, between or behind its layers is done on stage {stage} "
        "too, or left out there: a multiplier or norm of the embeddings, positions, a final norm "
        "of another name, a tensor that layers read besides the hidden states"
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def facts_of(
    split: SplitToProve,
    small: PretrainedConfig,
    partition: Sequence[int],
    code: Sequence[str] = CODE,
) -> dict[str, Any]:
    """All that a comparison depends on, as JSON has it."""
    told = small.to_dict()
    config = {k: v for k, v in told.items() if k not in ("_name_or_path", "transformers_version")}
    return {
        "config": json.loads(json.dumps(config, default=str)),
        "partition": list(partition),
        "vision_stages": split.vision_stages,
        "part": split.name,
        "options": {name: str(value) for name, value in sorted(split.options.items())},
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "code": _code_of(split, code),
    }


def _code_of(split: SplitToProve, code: Sequence[str]) -> str:
    """A sum of the code that splits and is split: of engine, shelf, part and model folder."""
    package = Path(__file__).resolve().parents[1]
    files = {file for pattern in code for file in package.glob(pattern)}
    if split.trust_remote_code and split.config_path:
        files |= set(find_folder(split.config_path).glob("*.py"))
    owner = getattr(split.part, "__self__", None)
    one: Any
    for one in (split.part, *(owner.__mro__ if isinstance(owner, type) else ())):
        with contextlib.suppress(TypeError):  # it has no file
            home = Path(inspect.getsourcefile(inspect.unwrap(one)) or "")
            if home.is_file() and "site-packages" not in home.parts:
                files.add(home)
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def record_of(facts: Mapping[str, Any]) -> Path:
    """Where a comparison is kept, by what it depends on."""
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "proofs" / f"{name}.json"


def is_proven(record: Path) -> bool:
    """Whether a comparison is on record."""
    try:
        return "facts" in json.loads(record.read_bytes())
    except (OSError, ValueError):
        return False
