"""Check a model folder before transformers reads it: broken JSON, own code, no folder at all.

Everything that loads a config, tokenizer or processor uses this module: transformers would ask on
the terminal whether to run code, or look up a missing folder on the network.
"""

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from stageline.errors import CheckpointError, UserError
from stageline.hub import name_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# transformers reads settings from these; config.5.0.0.json may replace config.json
_SETTINGS = ("config*.json", "*_config.json", "chat_template.json")
# these files and the weights determine what a model and its tokenizer do
_DECIDING = (
    "config.json adapter_config.json *processor_config.json tokenizer* special_tokens_map.json "
    "added_tokens.json chat_template.* vocab.* merges.txt *.model *.tiktoken *.py"
).split()
_CODE = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation")


def find_folder(path: str | Path, *, option: str = "`model_path`") -> Path:
    """Return the folder of a model on this machine, or the folder of a file."""
    found = Path(path).expanduser()
    if not found.exists():
        raise UserError(f"{path} in {option} is not a folder of this machine. Check the path.")
    return found.parent if found.is_file() else found


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object in a file of a model folder, or raise CheckpointError."""
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
        why = f"it holds a {type(content).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)[:200]
    raise CheckpointError(f"{path} cannot be read as a JSON object ({why}). Copy it again.")


def check_folder(path: str | Path, *, trust_remote_code: bool) -> Path:
    """Return a folder; refuse broken settings, and Python code without `trust_remote_code`."""
    folder = find_folder(path)
    for file in sorted({file for pattern in _SETTINGS for file in folder.glob(pattern)}):
        settings = read_json(file)
        code = sorted(set(_code_names(settings)))
        if code and not trust_remote_code:
            cure = "If you have read it and trust it, give `trust_remote_code`."
            if settings.get("model_type") == "internvl_chat":
                name = name_of(folder)
                ready = f"Take {name.repo}-hf, if the hub has it, or convert" if name else "Convert"
                cure = f"{ready} the folder: python tools/convert_internvl.py {folder} NEW_FOLDER"
            raise UserError(
                f"{file} names code of its own in auto_map ({', '.join(code)[:200]}). {cure}"
            )
    return folder


def files_fingerprint(path: str | Path, *, answers: bool = False) -> str:
    """Return a hash of the settings, tokenizer and processor of a folder, without its path.

    Args:
        answers: the model is asked, so that what ends an answer counts.
    """
    told, folder = hashlib.sha256(), find_folder(path)
    patterns = [*_DECIDING, "generation_config.json"] if answers else _DECIDING
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    for file in sorted(found):
        told.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()} ".encode())
    return told.hexdigest()


def _code_names(value: Any, key: str = "") -> Iterator[str]:
    """Yield the code that settings name, at any depth: sub-configs have their own auto_map."""
    if isinstance(value, dict | list):
        named = value.items() if isinstance(value, dict) else [(key, one) for one in value]
        for name, inner in named:
            yield from _code_names(inner, key if key in _CODE else name)
    # "org/name" in place of sdpa is a compiled kernel that transformers would fetch
    elif value is not None and (key == "auto_map" or (key in _CODE and "/" in str(value))):
        yield str(value)


def load_config(
    path: str | Path, *, trust_remote_code: bool = False, keeps_bits: bool = False
) -> "PretrainedConfig":
    """Return the model's config, only from this machine.

    Args:
        keeps_bits: keep `quantization_config`, which tells of the weights in this folder. A model
            that is trained has none: checkpoint/few_bit.py dequantizes while it reads them.

    Raises:
        UserError: no folder, code that is not allowed, or a model unknown to transformers.
        CheckpointError: config.json is broken or has wrong values.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    folder = check_folder(path, trust_remote_code=trust_remote_code)
    file = folder / "config.json"
    if not file.exists():
        raise UserError(f"{path} holds no config.json. Give the folder of a model.")
    kind, told = read_json(file).get("model_type"), {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **told)
    except Exception as error:  # wrong values can raise any exception type
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        is_unknown = isinstance(kind, str) and kind not in CONFIG_MAPPING
        raise (UserError if is_unknown else CheckpointError)(
            f"{file} holds no config that can be read ({why}). Correct it, or make a model_type of "
            "your own known by AutoConfig.register() in the file that you `import`."
        ) from error
    for part in () if keeps_bits else (config, *parts_of(config).values()):
        part.__dict__.pop("quantization_config", None)
    return config


def has_trusted_code(config: object) -> bool:
    """Return whether a config has code, which `load_config` accepts only with the flag."""
    return bool(getattr(config, "auto_map", None))


def attention_options(config: "PretrainedConfig", asked: object = None) -> dict[str, Any]:
    """Return the `attn_implementation` to build a model with; empty: transformers selects it.

    It selects sdpa for Gemma 2, and sdpa has no soft cap of attention scores.

    Raises:
        ValueError: sdpa was requested for such a model.
    """
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        if asked == "sdpa":
            raise ValueError("the attention sdpa ignores attn_logit_softcapping")
        asked = asked or "eager"
    return {"attn_implementation": asked} if asked else {}


def refused_build(
    config: "PretrainedConfig",
    auto_class: Any,
    error: Exception,
    attn_implementation: str | None = None,
) -> UserError:
    """Return transformers' refusal to build a model as a UserError."""
    if isinstance(error, UserError):
        return error
    text, name = " ".join(str(error).split())[:300], auto_class.__name__
    if isinstance(error, ValueError) and "Unrecognized configuration class" in text:
        return UserError(
            f"transformers' {name} has no model for {config.model_type}. Choose a `train_model` of "
            f"the model's kind, or register its class by {name}.register() in the file that you "
            "`import`."
        )
    what, cure = "built", "Correct its config.json, or install the packages that it needs"
    if attn_implementation and ("attention" in text.lower() or "flash" in text.lower()):
        what = f"built with the attention {attn_implementation}"
        cure = "Drop `attention` (or `train_model.attn_implementation`), or use `attention` eager"
    elif has_trusted_code(config):
        cure = (
            "Correct the code of its folder, for example a list `_tied_weights_keys`, which is a "
            "mapping {head: embedding} since transformers 5"
        )
    reason = f"{type(error).__name__}: {text}"
    return UserError(f"{config.model_type} cannot be {what} ({reason}). {cure}.")


def is_of_library(model: object) -> bool:
    """Return whether the class of a model is one of transformers."""
    return type(model).__module__.startswith("transformers.")


# padding stands on the right, where no token of a decoder sees it (`masks_padding` knows where not)
_SPARED = frozenset({"attention_mask", "use_cache", "return_dict"})
_CALLED_ALIKE: set[type] = set()
ModelT = TypeVar("ModelT", bound="PreTrainedModel")


def called_alike(model: ModelT) -> ModelT:
    """Adapt a class with a forward that lacks arguments, or that returns logits without a name."""
    from transformers.modeling_outputs import CausalLMOutput

    kind: Any = type(model)
    if is_of_library(model) or kind in _CALLED_ALIKE:
        return model
    forward: Callable[..., Any] = kind.forward
    known = inspect.signature(forward).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
    lacked = frozenset() if takes_all else _SPARED.difference(known)

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name not in lacked}
        output = forward(self, *args, **given)
        if type(output) in (tuple, dict) and "labels" not in kwargs:  # a loss would come first
            output = output[0 if type(output) is tuple else "logits"]
        return CausalLMOutput(logits=output) if isinstance(output, torch.Tensor) else output

    kind.forward = run
    _CALLED_ALIKE.add(kind)
    return model


# Token ids that are not text, read from a configuration and those inside it. They need no
# tokenizer: padding, begin and end, the placeholders of pictures and sounds.

NAMES = re.compile(
    r".*(token_ids?|token_index|_start_id|_end_id|newline_id|patch_id|(pad|eos|bos|unk|mask)_index)"
)


def is_token(name: str) -> bool:
    """Return whether a field of this name holds one or several token ids."""
    return bool(NAMES.fullmatch(name)) and "layer" not in name


def parts_of(config: "PretrainedConfig") -> "dict[str, PretrainedConfig]":
    """Return the configurations inside this one, by the names of their fields."""
    from transformers import PretrainedConfig

    found = {name: config.__dict__.get(name) for name in config.to_dict()}
    return {name: part for name, part in found.items() if isinstance(part, PretrainedConfig)}


def walk_config(config: "PretrainedConfig") -> "Iterator[PretrainedConfig]":
    """Yield a configuration and those inside it."""
    yield config
    for part in parts_of(config).values():
        yield from walk_config(part)


def special_tokens(config: "PretrainedConfig") -> frozenset[int]:
    """Return the ids of all tokens that are not text."""
    fields = [item for part in walk_config(config) for item in part.to_dict().items()]
    found = [value for name, value in fields if is_token(name)]
    ids = [one for value in found for one in (value if isinstance(value, list) else [value])]
    return frozenset(one for one in ids if isinstance(one, int))


def rope_parameters(text: "PretrainedConfig") -> list[dict[str, Any]]:
    """Return the rope parameters of each kind of layer of a language model, or of all."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def short_length(text: "PretrainedConfig") -> int | None:
    """Return the tokens of a pass up to which LongRoPE takes its short frequencies, or None."""
    scaled = [one for one in rope_parameters(text) if one.get("rope_type") == "longrope"]
    known = [one.get("original_max_position_embeddings") for one in scaled]
    return min((length for length in known if length is not None), default=None)
