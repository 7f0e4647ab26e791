"""Proves that an exported folder computes what the checkpoint does.

The checkpoint's side is its stages, as training runs them; the engine gets them from a function, as
it knows no architecture. Without one, it is plain transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from stageline.checkpoint.adapter import base_of, config_folder, token_ids_on_disk
from stageline.checkpoint.adapter_start import Adapters
from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.checkpoint.host_memory import available_memory
from stageline.checkpoint.plain_model import (
    CLASSIFIER,
    load_base,
    load_plain,
    load_with_peft,
    weight_sizes,
)
from stageline.data.images.images import CROSS_MASK, grow_cross_mask
from stageline.data.text.processor import get_image_processor, get_pad_token_id, load_processor
from stageline.errors import CRASH, UserError
from stageline.model_folder import load_config, special_tokens
from stageline.stage import Stage

# -- inputs that an export is tried with ----------------------------------------------------------
# Random token ids, and a random image where there can be one.
#
# Shapes: B rows, T tokens.

Inputs = dict[str, torch.Tensor]
ROWS, TOKENS = 2, 12
IMAGE_SIZE = 112
QUESTION = "What is in this picture?"


def make_probes(
    config: PretrainedConfig,
    folder: Path,
    *,
    new_ids: Sequence[int] = (),
    trust_remote_code: bool = False,
) -> tuple[dict[str, Inputs], str | None]:
    """Name -> inputs of a forward pass, and why there is no image among them where one belongs.

    Args:
        folder: where the processor lies, if there is one.
        new_ids: of tokens whose rows the model got in training.
    """
    probes = {"text": text_probe(config, new_ids)}
    if getattr(config, "vision_config", None) is None:
        return probes, None
    try:
        processor = load_processor(folder, trust_remote_code=trust_remote_code)
        if get_image_processor(processor) is None:
            return probes, "the processor knows no images"
        probes["image"] = _image_probe(config, processor)
    except (UserError, OSError, ValueError, RuntimeError, AttributeError, ImportError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return probes, f"no image could be prepared ({type(error).__name__}: {first})"
    return probes, None


def text_probe(config: PretrainedConfig, new_ids: Sequence[int] = ()) -> Inputs:
    """Fixed random ids [B, T] that stand for nothing special; the first row begins with new ids."""
    text = config.get_text_config(decoder=True)
    special = special_tokens(config)
    plain = torch.tensor([i for i in range(text.vocab_size) if i not in special])
    longest = getattr(text, "max_position_embeddings", None) or 2 * TOKENS
    shape = (ROWS, max(1, min(TOKENS, longest // 2)))
    chosen = torch.randint(len(plain), shape, generator=torch.Generator().manual_seed(0))
    ids = plain[chosen]
    shown = torch.tensor(new_ids[: shape[1]], dtype=ids.dtype)
    ids[0, : len(shown)] = shown
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image_probe(config: PretrainedConfig, processor: Any) -> Inputs:
    """One random image with a question, as training gives it to a model."""
    from PIL import Image  # with it come the readers of images, which a text model does not need

    from stageline.data.batches.batch import add_image_inputs, encode_sample, pad_rows
    from stageline.data.text.rendered import Piece, Rendered, plain_image_text

    size = getattr(config.vision_config, "image_size", None) or IMAGE_SIZE
    size = max(size) if isinstance(size, list | tuple) else size
    pixels = torch.randint(
        256, (size, size, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    image = Image.fromarray(pixels.numpy())
    pieces = (Piece(plain_image_text(processor), is_image=True), Piece(QUESTION, is_user=True))
    row = encode_sample(Rendered(pieces), [image], processor=processor, name="the image")
    batch = pad_rows([row], pad_token_id=get_pad_token_id(processor), with_labels=False)
    add_image_inputs(batch, [[image]], processor=processor, names=["the image"], with_pixels=True)
    return batch


# -- what a model answers to a probe, on the CPU: logits and a few greedy tokens ------------------
# Computed twice for an export and compared: by the stages of training, chained in one process, and
# by the exported folder in plain transformers.
#
# Shapes: B rows, T tokens, N new tokens, V vocabulary.

NEW_TOKENS = 6
_TYPES = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class Answer:
    """The answer to one probe.

    Attributes:
        logits: [B, T, V] in float32; of a reward model [B, 1], the rewards.
        tokens: [B, N] greedy ones; None: the model does not generate.
        steps: [B, N, V], the logits that the tokens were chosen by; None: not kept.
    """

    logits: torch.Tensor
    tokens: torch.Tensor | None
    steps: torch.Tensor | None = None


@dataclass(frozen=True)
class AnswerComparison:
    """How far two answers are apart.

    Attributes:
        difference: largest difference of a logit, as a share of the largest logit.
        wrong_tokens: greedy tokens that differ, and by more than the tolerance explains.
    """

    difference: float
    wrong_tokens: int


@torch.no_grad()
def answer_of_stages(stages: Sequence[Stage], inputs: Inputs) -> Answer:
    """Runs stages one after the other, each as training runs it; no cache."""
    if getattr(stages[-1], "gives_scores", False):  # of rows without padding
        return Answer(_chain(stages, inputs)[:, -1], None)
    return _answer_step_by_step(lambda grown: _chain(stages, grown), inputs)


@torch.no_grad()
def answer_of_model(model: PreTrainedModel, inputs: Inputs, *, steps: bool = False) -> Answer:
    """Runs a model of transformers.

    Args:
        steps: chooses tokens one by one without the library's `generate`, and keeps their logits.
    """

    def run(grown: Inputs) -> torch.Tensor:
        if is_classifier:  # one without a padding token takes single rows only
            rows = zip(*(value.split(1) for value in grown.values()), strict=True)
            return torch.cat([model(**dict(zip(grown, row, strict=True))).logits for row in rows])
        output = model(**grown, use_cache=False) if can_generate else model(**grown)
        return getattr(output, "logits", output[0]).float()

    can_generate = model.can_generate()
    is_classifier = type(model).__name__.endswith(CLASSIFIER)
    if can_generate and steps:
        return _answer_step_by_step(run, inputs)
    return Answer(run(inputs), _generate(model, inputs) if can_generate else None)


def compare_answers(expected: Answer, found: Answer, *, tolerance: float) -> AnswerComparison:
    """Compares logits and tokens; a choice between two equally likely tokens is free."""
    largest = expected.logits.abs().max()
    difference = ((found.logits - expected.logits).abs().max() / largest).item()
    wrong = 0
    if expected.tokens is not None and found.tokens is not None and expected.steps is not None:
        for row, (own, other) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
            places = (own != other).nonzero().flatten().tolist()
            if not places:
                continue
            first = places[0]  # what follows has other words before it
            scores = expected.steps[row, first]
            gap = (scores[own[first]] - scores[other[first]]).item()
            wrong += not gap <= 2 * tolerance * largest.item()
    return AnswerComparison(difference, wrong)


def _chain(stages: Sequence[Stage], inputs: Inputs) -> torch.Tensor:
    """Logits [B, T, V]."""
    values: tuple[torch.Tensor, ...] = (inputs["input_ids"],)
    for stage in stages:
        output = stage(*values, **inputs)
        values = output if isinstance(output, tuple) else (output,)
    return values[0].float()


def _answer_step_by_step(run: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> Answer:
    logits = run(inputs)
    last, grown, steps = logits[:, -1], inputs, []
    for number in range(NEW_TOKENS):
        steps.append(last)
        grown = _grow(grown, last.argmax(-1, keepdim=True))
        if number < NEW_TOKENS - 1:
            last = run(grown)[:, -1]
    tokens = grown["input_ids"][:, inputs["input_ids"].shape[1] :]
    return Answer(logits, tokens, torch.stack(steps, dim=1))


def _grow(inputs: Inputs, tokens: torch.Tensor) -> Inputs:
    """The inputs with one more token in each row."""
    more = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    more |= {name: torch.zeros_like(tokens) for name in _TYPES}
    if CROSS_MASK in inputs:
        inputs = {**inputs, CROSS_MASK: grow_cross_mask(inputs[CROSS_MASK])}
    return {
        name: torch.cat([value, more[name]], dim=1) if name in more else value
        for name, value in inputs.items()
    }


def _generate(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    # the model's own would add penalties and stop early
    model.generation_config = GenerationConfig()
    wanted = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS)
    tokens = cast(Any, model).generate(**inputs, generation_config=wanted)
    return tokens[:, inputs["input_ids"].shape[1] :]


# -------------------------------------------------------------------------------------------------

# a checkpoint's folder -> its stages in float32 on the CPU, or why there are none
StageMaker = Callable[[Path], Sequence[Stage] | str]
# largest difference of a logit allowed, as a share of the largest; both sides are computed in
# float32, so that the greater ones are what rounding the weights to a half type does
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
COMPUTE = torch.float32


class ExportError(RuntimeError):
    """What was written does not compute what the checkpoint does."""

    exit_code = CRASH
    kind = "export"


@dataclass(frozen=True)
class ExportVerdict:
    """How an export was compared.

    Attributes:
        reference: what it was compared with, in words.
        difference: largest difference of a logit, as a share of the largest.
        tolerance: how much was allowed.
        probes: what was tried: text, image.
        notes: what was not compared, and why.
    """

    reference: str
    difference: float
    tolerance: float
    probes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def lacks_memory(source: Path, *, trust_remote_code: bool = False) -> str | None:
    """Why a comparison does not fit into this machine's memory; None: it fits.

    Two models in float32, though they are never there at once: loading one has peaks.
    """
    available = available_memory()
    if available is None:
        return None
    count, _ = weight_sizes(base_of(source))
    config = read_config_of_base(source, trust_remote_code=trust_remote_code)
    vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", 0)
    needed = 2 * count * COMPUTE.itemsize + 64 * vocab_size * COMPUTE.itemsize * 8
    if needed <= available:
        return None
    return (
        f"comparing needs {needed / 1e9:.1f} GB of host memory (twice the model in float32), "
        f"{available / 1e9:.1f} GB are free"
    )


def read_config_of_base(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a model folder, or of the model that an adapter belongs to."""
    return load_config(config_folder(folder), trust_remote_code=trust_remote_code)


def check_export(
    source: Path,
    exported: Path,
    *,
    rounded_to: torch.dtype | None,
    make_stages: StageMaker | None = None,
    adapters: Adapters | None = None,
    trust_remote_code: bool = False,
) -> ExportVerdict:
    """Compares logits and greedy tokens of a checkpoint and of what was exported of it.

    Args:
        adapters: what was added to it.
        rounded_to: a half type that weights were rounded to; None: no weight was.

    Raises:
        ExportError: they differ by more than the tolerance.
    """
    config = read_config_of_base(source, trust_remote_code=trust_remote_code)
    told = [source, *(adapters.paths if adapters else ())]
    new_ids = sorted({token for folder in told for token in token_ids_on_disk(folder)})
    probes, note = make_probes(
        config, exported, new_ids=new_ids, trust_remote_code=trust_remote_code
    )
    notes = [] if note is None else [f"compared without an image: {note}"]
    expected, reference, why = _expected(source, probes, make_stages, adapters, trust_remote_code)
    notes += [] if why is None else [why]
    model = _load_exported(exported, trust_remote_code=trust_remote_code)
    tolerance = TOLERANCE[rounded_to or COMPUTE]
    worst = 0.0
    for name, inputs in probes.items():
        found = compare_answers(expected[name], answer_of_model(model, inputs), tolerance=tolerance)
        if not found.difference <= tolerance:  # also when it is NaN
            raise ExportError(
                f"the exported model's logits differ from the checkpoint's by "
                f"{found.difference:.2e} of the largest ({name}, compared with {reference}), at "
                f"most {tolerance} was expected: what was written is not the same model. Nothing "
                "was kept; export with `dtype` float32, and report this."
            )
        if found.wrong_tokens:
            raise ExportError(
                f"the exported model generates other tokens than the checkpoint in "
                f"{found.wrong_tokens} rows ({name}, compared with {reference}), though its "
                "logits agree: the same were expected, as nothing else decides about them. "
                "Nothing was kept; report this."
            )
        worst = max(worst, found.difference)
    return ExportVerdict(reference, worst, tolerance, tuple(probes), tuple(notes))


def _expected(
    source: Path,
    probes: dict[str, Inputs],
    make_stages: StageMaker | None,
    adapters: Adapters | None,
    trust_remote_code: bool,
) -> tuple[dict[str, Answer], str, str | None]:
    """Answers of the checkpoint, of whom they are, and why not of its stages."""
    why = None
    if make_stages is not None and adapters is None:
        stages = make_stages(source)
        if not isinstance(stages, str):
            answers = {name: answer_of_stages(stages, inputs) for name, inputs in probes.items()}
            return answers, f"its {len(stages)} stages", None
        why = f"compared with plain transformers, not with stages: {stages}"
    model = load_plain(source, dtype=COMPUTE, trust_remote_code=trust_remote_code)
    if adapters is not None:
        adapters.merge(model)
    answers = {name: answer_of_model(model, inputs, steps=True) for name, inputs in probes.items()}
    return answers, "the checkpoint in plain transformers", why


def _load_exported(folder: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """As its user would: an adapter through `peft` where that is installed."""
    if (folder / ADAPTER_CONFIG).exists():
        base = load_base(folder, dtype=COMPUTE, trust_remote_code=trust_remote_code)
        adapted = load_with_peft(folder, base)
        if adapted is not None:
            return adapted
    return load_plain(folder, dtype=COMPUTE, trust_remote_code=trust_remote_code)
