"""A folder in plain transformers, as a user of an exported model has it: loaded, and tried.

One process holds the whole model. It and the stages of training, chained in one process, answer the
same probes: logits and a few greedy tokens, on the CPU.

Shapes: B rows, T tokens, N new tokens, V vocabulary.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from stageline.checkpoint.adapter import (
    attach_adapter,
    config_folder,
    find_base,
    fit_vocabulary,
    read_adapter,
)
from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    list_names,
    misfits,
    open_tensors,
    other_shape,
    weight_files,
)
from stageline.checkpoint.init import check_finite, loaded_dtype
from stageline.checkpoint.load import FLOATS, dtypes_of, integer_weights
from stageline.data.images.images import CROSS_MASK, grow_cross_mask
from stageline.data.text.processor import get_image_processor, get_pad_token_id, load_processor
from stageline.errors import CheckpointError, UserError
from stageline.model_folder import (
    attention_options,
    called_alike,
    has_trusted_code,
    load_config,
    read_json,
    refused_build,
    special_tokens,
)
from stageline.stage import Stage

CAUSAL_LM = "AutoModelForCausalLM"
CLASSIFIER = "ForSequenceClassification"  # with one label: a reward model
SCORED = "SEQ_CLS"
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", CLASSIFIER: SCORED}


def task_of(model_class: str) -> str | None:
    """What peft calls the kind of model that a class is; None: no kind that it knows."""
    return next((task for end, task in _TASKS.items() if model_class.endswith(end)), None)


def is_scored(adapter: Path) -> bool:
    """Whether an adapter belongs on a model that scores rows instead of predicting tokens."""
    return read_json(adapter / ADAPTER_CONFIG).get("task_type") == SCORED


def load_whole(
    auto_class: Any,
    folder: Path,
    config: PretrainedConfig,
    *,
    is_strict: bool = False,
    may_lack: str | None = None,
    is_changed: bool = False,
    **options: object,
) -> PreTrainedModel:
    """A whole model with every weight from the folder, none of them at random.

    Args:
        auto_class: an Auto class or a model class of the library.
        is_strict: weights that the model has no place for are refused, too.
        may_lack: beginning of the names of weights that others fill; None: none.
        is_changed: `config` is not the folder's own, and counts.
        options: of its `from_pretrained`.

    Raises:
        CheckpointError: weights are missing, of another shape, quantised without a config that
            says so, or cannot be read.
    """
    files = weight_files(folder)
    if is_changed:
        options = {**options, "config": config}
    options |= attention_options(config, options.pop("attn_implementation", None))
    if getattr(config, "quantization_config", None) is None:
        integers = integer_weights(dtypes_of(files), {"weight", "bias"})
        if integers:
            raise _does_not_fit(folder, f"weights are integers: {list_names(integers, 5)}")
    try:
        model, info = auto_class.from_pretrained(
            folder,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,  # never a pickle that lies there too
            ignore_mismatched_sizes=True,  # reported below
            **options,
        )
    except Exception as error:  # the library raises what it likes
        of_code = has_trusted_code(config) and isinstance(error, AttributeError | TypeError)
        if of_code or "Unrecognized configuration class" in str(error):
            raise refused_build(config, auto_class, error) from error
        raise _does_not_fit(folder, str(error).strip()[:500]) from error
    lacking = {
        name for name in info["missing_keys"] if may_lack is None or not name.startswith(may_lack)
    }
    wrong = [other_shape(*mismatch) for mismatch in info["mismatched_keys"]]
    why = misfits(lacking, info["unexpected_keys"] if is_strict else (), wrong)
    if why:
        raise _does_not_fit(folder, why)
    check_finite(
        model.named_parameters(),
        what=f"weights of {folder}",
        cure="Get these files anew, or take another model.",
    )
    return called_alike(model)


def _does_not_fit(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be loaded: {why}. Every weight of the model that config.json describes "
        "was expected, with its shape: the library would start others at random. Copy the "
        "checkpoint again, or use one that is whole."
    )


def save_whole(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Saves a model by the library's own writer, also one whose code is of transformers 4."""
    for module in model.modules():
        # a list there cannot be read any more; one that names ties is refused when it is built
        if isinstance(getattr(module, "_tied_weights_keys", None), list):
            module.__dict__["_tied_weights_keys"] = None
    model.save_pretrained(folder, **options)


def load_plain(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    config_from: Path | None = None,
) -> PreTrainedModel:
    """The whole model of a folder on the CPU; an adapter is put on its base.

    Args:
        dtype: to load in; None: as the folder has it.
        config_from: the folder whose configuration counts, if not this one's.
    """
    if (folder / ADAPTER_CONFIG).exists():
        base = load_base(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        return attach_adapter(base, folder).eval()
    config = load_config(config_from or folder, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"dtype": dtype or _dtype_of(folder)}
    model_class = _class_of(config)
    if model_class is transformers.AutoModelForCausalLM:
        options["trust_remote_code"] = trust_remote_code
    options["is_changed"] = config_from not in (None, folder)
    return load_whole(model_class, folder, config, is_strict=True, **options).eval()


def _class_of(config: PretrainedConfig) -> Any:
    own_code = getattr(config, "auto_map", None) or {}  # its class may have a name of the library's
    architecture = "" if CAUSAL_LM in own_code else (config.architectures or [""])[0]
    return getattr(transformers, architecture, transformers.AutoModelForCausalLM)


def adapter_dtype(
    adapter: Path, dtype: torch.dtype, *, trust_remote_code: bool
) -> Callable[[str], torch.dtype]:
    """Return a function: name of a weight of an adapter -> the type it has in a base of `dtype`."""
    with open_tensors(adapter / ADAPTER_FILE) as tensors:
        if all(".lora_" in name for name in tensors.keys()):  # noqa: SIM118 - no dict
            return lambda name: dtype  # its base need not be here
    config = load_config(config_folder(adapter), trust_remote_code=trust_remote_code)
    model_class = _class_of(config)
    if model_class is not transformers.AutoModelForCausalLM:
        return loaded_dtype(model_class._from_config, config, dtype)
    build = functools.partial(model_class.from_config, trust_remote_code=trust_remote_code)
    return loaded_dtype(build, config, dtype)


def load_base(
    adapter: Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model that an adapter is put on; of a reward model's adapter one that scores."""
    folder, own = find_base(adapter), config_folder(adapter)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if not is_scored(adapter) or (config.architectures or [""])[0].endswith(CLASSIFIER):
        code = trust_remote_code
        return load_plain(folder, dtype=dtype, trust_remote_code=code, config_from=own)
    return load_whole(
        transformers.AutoModelForSequenceClassification,
        folder,
        config,
        num_labels=1,
        may_lack="score.",  # in the adapter
        dtype=dtype or _dtype_of(folder),
    ).eval()


def _dtype_of(folder: Path) -> torch.dtype | str:
    """The type of all weights; the configuration, which may say another, where they differ."""
    found = tensor_dtypes(folder)
    return found.pop() if len(found) == 1 else "auto"


def load_with_peft(folder: Path, base: PreTrainedModel) -> PreTrainedModel | None:
    """The base with an adapter put on by `peft`, in place; None where that is not installed."""
    try:
        from peft import PeftModel
    except ImportError:
        return None
    fit_vocabulary(base, [read_adapter(folder)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it asks transformers by an old name
        adapted = PeftModel.from_pretrained(base, folder, local_files_only=True)
        return cast(PreTrainedModel, adapted.get_base_model()).eval()


def tensor_dtypes(folder: Path) -> set[torch.dtype]:
    """The floating-point types in a model or adapter folder; reads headers only."""
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    files = weight_files(folder / ADAPTER_FILE if is_adapter else folder)
    found = set(dtypes_of(files).values())
    return {FLOATS[name] for name in found if name in FLOATS}


def weight_sizes(folder: Path) -> tuple[int, int]:
    """Number of weights in a model folder and their bytes; reads headers only."""
    count = num_bytes = 0
    for file in sorted(set(weight_files(folder).values())):
        num_bytes += file.stat().st_size
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dict
                count += torch.Size(tensors.get_slice(name).get_shape()).numel()
    return count, num_bytes


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
    probes = {"text": _text_probe(config, new_ids)}
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


def _text_probe(config: PretrainedConfig, new_ids: Sequence[int]) -> Inputs:
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


NEW_TOKENS = 6
_TYPES = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class Answer:
    """The answer to one probe.

    Attributes:
        logits: [B, T, V] in float32; of a reward model [B, 1], the rewards.
        tokens: [B, N]; None: the model does not generate.
        steps: [B, N, V], the logits that the tokens were chosen by; None: not kept.
    """

    logits: torch.Tensor
    tokens: torch.Tensor | None
    steps: torch.Tensor | None = None


@torch.no_grad()
def answer_of_stages(stages: Sequence[Stage], inputs: Inputs) -> Answer:
    """Runs stages one after the other, each as training runs it; no cache."""
    if getattr(stages[-1], "gives_scores", False):  # of rows without padding
        return Answer(_chain(stages, inputs)[:, -1], None)
    return _answer_step_by_step(lambda grown: _chain(stages, grown), inputs)


@torch.no_grad()
def answer_of_model(model: PreTrainedModel, inputs: Inputs, *, steps: bool = False) -> Answer:
    """Runs a model of transformers.

    With `steps` tokens are chosen one by one, without its `generate`, and their logits are kept.
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


def compare_answers(expected: Answer, found: Answer, *, tolerance: float) -> tuple[float, int]:
    """Compares logits and tokens; a choice between two equally likely tokens is free.

    Returns:
        The largest difference of a logit, as a share of the largest logit, and the number of rows
        with other tokens than the tolerance explains.
    """
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
    return difference, wrong


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
