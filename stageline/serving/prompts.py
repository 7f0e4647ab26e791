"""Turn the messages or texts of a request into prompts of the engine, in threads of their own.

What users write stays plain text: their special tokens become none. Roles are a closed list, and
the template is the model's.
"""

import base64
import functools
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from io import BytesIO
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from stageline.data.batches.batch import add_image_inputs, render_sample
from stageline.data.images.image_files import FORMATS, check_shape, open_picture
from stageline.data.images.images import ImageExpander, decode_image
from stageline.data.text.chat_template import ChatTemplate, strings_in
from stageline.data.text.processor import get_image_token, get_tokenizer, num_token_ids
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError
from stageline.inference.generation import encode_prompts
from stageline.serving.errors import ApiError, bad_request
from stageline.serving.tool_calls import ToolFormat, find_format

# a prompt_fn part takes a template as well; messages do without
_TEMPLATE = "[QUESTION][ANSWER]"
_ROLES = {"developer": "system"}
_KWARGS = "chat_template_kwargs"
_LONGEST_VALUE = 2000
# arguments of transformers' own functions
_OWN = {"messages", *inspect.signature(render_jinja_template).parameters}
_OWN |= inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()

Prompt = Mapping[str, torch.Tensor]
RenderPart = Callable[..., Rendered]


@dataclass(eq=False)
class PromptMaker:
    """Makes prompts with one processor.

    Args:
        render: a prompt_fn part, (sample, prompt, processor=, for_generation=) -> Rendered.
        image_token: an image_token part, (rendered, images, processor=) -> Rendered.
        max_length: positions of the model; texts that can't fit are not even tokenized.
        max_images: of one request.
        max_pixels: of each, width x height; known from its header before it is decoded.
    """

    processor: Any
    _: KW_ONLY
    render: RenderPart
    image_token: RenderPart
    max_images: int
    max_pixels: int
    max_length: int | None = None

    def __post_init__(self) -> None:
        self.tokenizer = get_tokenizer(self.processor)
        self.num_ids = num_token_ids(self.processor)
        self.longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        # layouts of a template are kept in a dictionary that is changed by each reader
        self._lock = threading.Lock()

    @property
    def takes_images(self) -> bool:
        """Return whether messages may have pictures."""
        return self.max_images > 0 and get_image_token(self.processor) is not None

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """Return how the model writes tool calls; None: in a way that no grammar is made for."""
        with self._lock:
            return find_format(self.processor)

    def warm_up(self) -> None:
        """Try the chat template once, so that the first request is quick.

        Raises:
            UserError: the model has none, or a wrong one.
        """
        try:
            self.of_messages([{"role": "user", "content": "Hello"}], tools=[])
        except ApiError as error:
            raise UserError(str(error)) from None

    def of_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        asked: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """Return the prompt of a chat.

        Args:
            messages: as OpenAI's API has them.
            tools: that are shown to the model.
            asked: fields of the request: where the answer begins, variables of the template.

        Raises:
            ApiError: the template can't write them, or a picture can't be had.
        """
        begins_answer = asked.get("add_generation_prompt", True)
        continues, last, why = bool(asked.get("continue_final_message")), messages[-1], ""
        if asked.get("add_generation_prompt"):
            why = "add_generation_prompt, which begins a new one"
        elif last.get("tool_calls"):
            why = "a last message that has tool_calls, behind which no text can follow"
        elif asked.get("tool_choice", "auto") not in ("auto", "none"):
            why = "a tool_choice that makes the answer a call and nothing else"
        if continues and why:
            message = f"continue_final_message came with {why}. Leave one of them out."
            raise bad_request(message, "continue_final_message")
        if last["role"] == "assistant" and begins_answer and not continues:
            raise bad_request(
                "The last message is the assistant's. Add one of the user or of a tool, or set "
                "continue_final_message to continue it.",
                "messages",
            )
        options = self._variables(asked)
        if continues:
            options["continue_final_message"] = True  # transformers' own way to end the text there
        render = self.render
        if options and "template_options" not in inspect.signature(render).parameters:
            message = f"This server has no chat template that reads {', '.join(options)}."
            param = _KWARGS if asked.get(_KWARGS) else next(iter(options))
            raise bad_request(message, param, "unsupported_parameter")
        if options:
            bound = getattr(render, "keywords", {}).get("template_options") or {}
            render = functools.partial(render, template_options={**bound, **options})
        contents = [message.get("content") for message in messages]
        parts = [part for one in contents if isinstance(one, list) for part in one]
        texts = [one for one in contents if isinstance(one, str)]
        texts += [part["text"] for part in parts if part["type"] == "text"]
        self._check_size(sum(map(len, texts)), "messages")
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        images = self._read_pictures(urls)
        sample = {
            "id": "request",
            "messages": [_plain(message) for message in messages],
            "tools": [dict(tool) for tool in tools],
        }
        try:
            with self._lock:
                rendered = render_sample(
                    images,
                    sample,
                    prompt=_TEMPLATE,
                    prompt_fn=render,
                    image_token=self.image_token,
                    processor=self.processor,
                    for_generation=begins_answer and not continues,
                )
            rendered = replace(rendered, for_generation=True)
            return encode_prompts([rendered], [images], processor=self.processor)
        except UserError as error:
            raise self._refused(error) from None

    def _variables(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that a request sets in the chat template, after checking them."""
        given = dict(asked.get(_KWARGS) or {})
        effort = asked.get("reasoning_effort")
        refuse = functools.partial(bad_request, code="unsupported_parameter")
        if effort is not None and given.setdefault("reasoning_effort", effort) != effort:
            raise refuse("reasoning_effort is given twice. Give it once.", param=_KWARGS)
        if not given:
            return given
        template = ChatTemplate.of(self.processor)
        own = {*_OWN, *template.tokenizer.special_tokens_map}
        known = template.variables - own
        for name, value in given.items():
            param = name if effort is not None and name == "reasoning_effort" else _KWARGS
            written = json.dumps(value, ensure_ascii=False)
            if name in own:
                raise refuse(f"{name} is set by the server. Leave it out.", param=param)
            if name not in known:
                raise refuse(
                    f"The model's chat template does not read {name[:100]!r}. What it reads is: "
                    f"{', '.join(sorted(known)) or 'none'}. Leave the others out.",
                    param=param,
                )
            if len(written) > _LONGEST_VALUE or any(map(template.is_risky, strings_in(value))):
                raise refuse(
                    f"{name} is {written[:100]}. Give at most {_LONGEST_VALUE} letters of JSON in "
                    "ASCII, without letters that special tokens begin or end with.",
                    param=param,
                )
        return given

    def of_text(self, text: str, *, is_whole: bool = False) -> Prompt:
        """Return the prompt of a text; unless it is whole it gets the tokenizer's first tokens."""
        self._check_size(len(text), "prompt")
        rendered = Rendered((Piece(text, is_user=True),), is_chat=is_whole, for_generation=True)
        try:
            prompt = encode_prompts([rendered], [None], processor=self.processor)
        except UserError as error:
            raise self._refused(error) from None
        if not prompt["attention_mask"].any():
            raise bad_request("The prompt has no tokens.", "prompt")
        return prompt

    def of_ids(self, ids: Sequence[int]) -> Prompt:
        """Return the prompt of some token ids as they are."""
        if max(ids) >= self.num_ids:
            message = f"The prompt has the token id {max(ids)}; the model has {self.num_ids}."
            raise bad_request(message, "prompt")
        image_token = get_image_token(self.processor)
        if image_token and self.tokenizer.convert_tokens_to_ids(image_token) in ids:
            raise bad_request("The prompt has the id of an image without one.", "prompt")
        input_ids = torch.tensor([list(ids)], dtype=torch.long)
        batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        add_image_inputs(
            batch, [None], processor=self.processor, names=["the prompt"], with_pixels=True
        )
        return batch

    def _check_size(self, num_letters: int, param: str) -> None:
        """Refuse a prompt with too many letters: tokenizing takes seconds for megabytes."""
        if self.max_length is None or num_letters <= self.max_length * self.longest_token:
            return
        raise bad_request(
            f"The prompt has {num_letters} letters. The model has {self.max_length} positions for "
            f"tokens, the longest of which has {self.longest_token}. Shorten the prompt.",
            param,
            "context_length_exceeded",
        )

    def _read_pictures(self, urls: Sequence[str]) -> list[Image.Image]:
        """Decode data URLs to RGB, or raise an ApiError. No file is read, no other server asked."""
        if urls and ImageExpander.of(self.processor) is None:
            message = "The model only reads text. Leave the images out."
            raise bad_request(message, "messages", "unsupported_parameter")
        if len(urls) > self.max_images:
            message = f"{len(urls)} images came; at most {self.max_images} are taken in a request."
            raise bad_request(message, "messages", "too_many_images")
        return [self._picture(url, f"image {number}") for number, url in enumerate(urls)]

    def _picture(self, url: str, name: str) -> Image.Image:
        refuse = functools.partial(bad_request, param="messages", code="invalid_image")
        head, comma, text = url.partition(",")
        kind = head.lower()
        cure = "Send a data URL (data:image/png;base64,...) or upload the picture on the chat page."
        if kind.startswith(("http://", "https://")):
            raise refuse(f"{name} has an http(s) URL, and this server fetches none. {cure}")
        if not (comma and kind.startswith("data:image/") and kind.endswith(";base64")):
            raise refuse(
                f"{name} has a URL that begins with {head[:40]!r}; files are not read. {cure}"
            )
        try:
            content = base64.b64decode(text, validate=True)
        except ValueError:
            raise refuse(f"{name} is no base64.") from None
        try:
            picture = open_picture(BytesIO(content))
        except Exception:  # Pillow's readers raise anything
            formats = ", ".join(FORMATS)
            message = f"{name} of {len(content)} bytes is no picture. Send one of {formats}."
            raise refuse(message) from None
        with picture:
            try:
                check_shape(picture, name=name, max_pixels=self.max_pixels)
                return decode_image(picture, name=name, max_pixels=self.max_pixels)
            except DataError as error:
                message = str(error).partition(" (`images.pixel_limit`)")[0].partition(". ")[0]
                raise refuse(f"{message.replace(' in memory', '')}.") from None

    def _refused(self, error: UserError) -> ApiError:
        """Return what a client is told, without names of folders of this machine."""
        text = str(error)
        if name := str(getattr(self.tokenizer, "name_or_path", "") or ""):
            text = text.replace(repr(name), "the model").replace(name, "the model")
        if not isinstance(error, DataError):
            for end in (". So it isn't", ": use ", "Final message to continue"):
                text = text.partition(end)[0]
        return bad_request(f"The messages can't be given to the model: {text}", param="messages")


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as rows of data have it, without what a reader sets itself."""
    kept = {name: value for name, value in message.items() if value not in (None, [])}
    kept["role"] = _ROLES.get(message["role"], message["role"])
    kept.setdefault("content", "")
    if message["role"] == "assistant":
        kept["weight"] = 0  # nothing is trained on here
    return kept
