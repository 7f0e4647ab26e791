"""Load and save tokenizers and processors, also where torchvision is not installed.

Some processors of vision-language models require a video processor, which exists with torchvision
only. Here they are composed without it: images and text work as in transformers, videos do not.
"""

import json
from pathlib import Path
from typing import Any

from stageline.errors import UserError
from stageline.model_folder import check_folder, read_json

# video processors that saved folders name, for machines that have torchvision
_VIDEO_TYPES = {
    "InternVLProcessor": "InternVLVideoProcessor",
    "Qwen2VLProcessor": "Qwen2VLVideoProcessor",
    "Qwen2_5_VLProcessor": "Qwen2VLVideoProcessor",
    "Qwen3VLProcessor": "Qwen3VLVideoProcessor",
    "SmolVLMProcessor": "SmolVLMVideoProcessor",
}
_CONFIG_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class _WithoutVideo:
    """Mixed into a processor class: its video processor may be None, also when it is saved."""

    video_config: dict[str, Any] | None = None
    get_attributes: Any  # a method of the processor class

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
        if argument_name == "video_processor" and argument is None:
            return type(None)
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()  # type: ignore[misc]
        if output.get("video_processor") is None:
            kind = _VIDEO_TYPES.get(type(self).__name__)
            output["video_processor"] = self.video_config or {"video_processor_type": kind}
        return output

    def save_pretrained(
        self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any
    ) -> list[str]:
        own: Any = type(self)
        names = [name for name in own.get_attributes() if name != "video_processor"]
        # transformers' loop does not expect None
        self.__dict__["get_attributes"] = lambda: names
        try:
            return super().save_pretrained(  # type: ignore[misc]
                save_directory, push_to_hub, **kwargs
            )
        finally:
            del self.__dict__["get_attributes"]


def compose_processor(
    class_name: str,
    *,
    image_processor: Any,
    tokenizer: Any,
    chat_template: str | None = None,
    video_config: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a processor of transformers' class `class_name`, without a video processor.

    `video_config` are the settings of the video processor, to be kept when saving; `options` are
    further arguments of the class, such as image_seq_length.
    """
    import transformers

    base = getattr(transformers, class_name)
    if class_name == "SmolVLMProcessor":  # requires num2words, for the prompts of videos only
        from transformers.models.smolvlm import processing_smolvlm

        if getattr(processing_smolvlm, "num2words", None) is None:
            processing_smolvlm.num2words = str
    processor_class = type(class_name, (_WithoutVideo, base), {})
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    if "video_processor" in base.get_attributes():
        parts["video_processor"] = None
    processor = processor_class(**parts, chat_template=chat_template, **options)
    processor.video_config = video_config
    return processor


def load_processor(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the processor of a vision-language model, or the tokenizer of a text model.

    Raises:
        UserError: the folder holds neither, or what it holds cannot be loaded, or it would run
            code without `trust_remote_code`.
        CheckpointError: a file of it is broken.
    """
    from transformers import AutoProcessor, AutoTokenizer

    path = check_folder(path, trust_remote_code=trust_remote_code)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        processor = AutoProcessor.from_pretrained(str(path), **options)
    except Exception as error:
        processor = _load_without_video(path, error, **options)
    if hasattr(processor, "convert_tokens_to_ids") or hasattr(processor, "tokenizer"):
        return processor
    try:  # with a broken tokenizer AutoProcessor returns only the image processor
        return AutoTokenizer.from_pretrained(str(path), **options)
    except Exception as error:
        raise _cannot_load(path, error) from error


def save_processor(processor: Any, path: str | Path) -> None:
    """Save a tokenizer or processor; one that cannot save itself whole, by its parts."""
    try:
        processor.save_pretrained(path)
    except Exception:
        # a processor of a model with video has a part that exists with torchvision only
        parts = [getattr(processor, name, None) for name in ("tokenizer", "image_processor")]
        if parts == [None, None]:
            raise
        for part in filter(None, parts):
            part.save_pretrained(path)


def get_tokenizer(processor: Any) -> Any:
    """Return the tokenizer of a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def num_token_ids(processor: Any) -> int:
    """Return the number of token ids, gaps included: `len(tokenizer)` leaves gaps out."""
    return max(get_tokenizer(processor).get_vocab().values(), default=-1) + 1


def get_image_processor(processor: Any) -> Any | None:
    """Return the image processor, or None for a text model."""
    return getattr(processor, "image_processor", None)


def get_pad_token_id(processor: Any) -> int:
    """Return the id of padding, which is masked by position: of PAD, else of EOS, else 0."""
    tokenizer = get_tokenizer(processor)
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return int(next((one for one in ids if one is not None), 0))


def get_image_token(processor: Any) -> str | None:
    """Return the text for one image in a prompt of this processor; None for a text model."""
    if get_image_processor(processor) is None:
        return None
    return getattr(processor, "image_token", None)


def _load_without_video(path: Path, error: Exception, **options: bool) -> Any:
    """Compose the processor where transformers refused to, or raise `UserError`."""
    import transformers

    settings: dict[str, Any] = {}
    for name in _CONFIG_FILES:  # any of them may name the class
        file = path / name
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if name == _CONFIG_FILES[0]:
            settings = found
        elif found.get("processor_class"):
            settings.setdefault("processor_class", found["processor_class"])
    class_name = settings.pop("processor_class", "")
    base = getattr(transformers, class_name, None)
    if base is None or "video_processor" not in base.get_attributes():
        raise _cannot_load(path, error) from error
    try:
        try:
            image_processor = transformers.AutoImageProcessor.from_pretrained(str(path), **options)
        except ImportError:  # the choice itself needs torchvision: take the one of Pillow
            own = settings.get("image_processor")
            if own is None:
                own = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
            name = own["image_processor_type"].removesuffix("Fast").removesuffix("Pil")
            image_processor = getattr(transformers, f"{name}Pil").from_dict(own)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), **options)
        file = path / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else tokenizer.chat_template
        return compose_processor(
            class_name,
            image_processor=image_processor,
            tokenizer=tokenizer,
            chat_template=template,
            video_config=settings.pop("video_processor", None),
            **{name: settings[name] for name in settings if name.startswith("image_seq_len")},
        )
    except Exception as second:
        raise _cannot_load(path, second) from second


def _cannot_load(path: Path, error: Exception) -> UserError:
    # large files without code, which `check_folder` leaves out
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json"):
        if (path / name).is_file():
            read_json(path / name)
    files = sorted(item.name for item in path.glob("*")) if path.is_dir() else []
    return UserError(
        f"no tokenizer or processor could be loaded from {path} "
        f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}); it "
        f"holds {', '.join(files) or 'nothing'}. Point `processor_path` to a folder with "
        "tokenizer.json (and processor_config.json for images)."
    )
