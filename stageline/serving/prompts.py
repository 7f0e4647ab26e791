"""From the messages or texts of a request to what the engine takes. Runs in threads of its own.

What users write stays plain text: their special tokens become none. Roles are a closed list, and
the template is the model's.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from stageline.data.batch import add_image_inputs, render_sample
from stageline.data.chat_template import ChatTemplate
from stageline.data.images import ImageExpander
from stageline.data.processor import get_image_token, get_tokenizer
from stageline.data.rendered import Piece, Rendered
from stageline.errors import DataError, UserError
from stageline.inference.generation import encode_prompts
from stageline.serving.errors import ApiError, bad_request
from stageline.serving.pictures import read_pictures
from stageline.serving.tool_formats import ToolFormat, find_format

# a prompt_fn part takes a template as well; messages do without
_TEMPLATE = "[QUESTION][ANSWER]"
_ROLES = {"developer": "system"}

Prompt = Mapping[str, torch.Tensor]
RenderPart = Callable[..., Rendered]


class PromptMaker:
    """Makes prompts with one processor.

    Args:
        render: a prompt_fn part, (sample, prompt, processor=, for_generation=) -> Rendered.
        image_token: an image_token part, (rendered, images, processor=) -> Rendered.
        max_length: positions of the model; texts that can't fit are not even tokenized.
        pictures: limits of `read_pictures`.
    """

    def __init__(
        self,
        processor: Any,
        *,
        render: RenderPart,
        image_token: RenderPart,
        max_length: int | None = None,
        **pictures: Any,
    ) -> None:
        self.processor = processor
        self.tokenizer = get_tokenizer(processor)
        self.num_ids = len(self.tokenizer)
        self.max_length = max_length
        self.longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        self.render = render
        self.image_token = image_token
        self.pictures = pictures
        # layouts of a template are kept in a dictionary that is changed by each reader
        self._lock = threading.Lock()

    @property
    def takes_images(self) -> bool:
        """Whether the model has a token for pictures."""
        return get_image_token(self.processor) is not None

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None: in a way that no grammar is made for."""
        with self._lock:
            return find_format(self.processor)

    def warm_up(self) -> None:
        """Tries the chat template once: a wrong one shows here, and the first request is quick."""
        self.of_messages([{"role": "user", "content": "Hello"}], tools=[])

    def of_messages(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]]
    ) -> Prompt:
        """The prompt of a chat.

        Args:
            messages: as OpenAI's API has them.
            tools: that are shown to the model.

        Raises:
            ApiError: the template can't write them, or a picture can't be had.
        """
        if messages[-1]["role"] == "assistant":
            raise bad_request(
                "The last message is the assistant's. One of the user or of a tool was expected, "
                "because the answer is a new message.",
                param="messages",
            )
        if tools and not self._knows_tools():
            raise bad_request(
                "The model's chat template knows no tools: leave tools out.",
                param="tools",
                code="unsupported_parameter",
            )
        self._check_size(sum(map(_num_letters, messages)), "messages")
        images = self._read_pictures(messages)
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
                    prompt_fn=self.render,
                    image_token=self.image_token,
                    processor=self.processor,
                    for_generation=True,
                )
            return encode_prompts([rendered], [images], processor=self.processor)
        except UserError as error:
            raise self._refused(error) from None

    def of_text(self, text: str) -> Prompt:
        """The prompt that is a text, with the first tokens that the tokenizer gives one."""
        self._check_size(len(text), "prompt")
        rendered = Rendered((Piece(text, is_user=True),), for_generation=True)
        try:
            prompt = encode_prompts([rendered], [None], processor=self.processor)
        except UserError as error:
            raise self._refused(error) from None
        if prompt["input_ids"].shape[1] == 0:
            raise bad_request("The prompt has no tokens; one was expected.", param="prompt")
        return prompt

    def of_ids(self, ids: Sequence[int]) -> Prompt:
        """The prompt of some token ids as they are."""
        if max(ids) >= self.num_ids:
            raise bad_request(
                f"The prompt has the token id {max(ids)}; the model has {self.num_ids}.",
                param="prompt",
            )
        image_token = get_image_token(self.processor)
        if image_token and self.tokenizer.convert_tokens_to_ids(image_token) in ids:
            raise bad_request("The prompt has the id of an image without one.", param="prompt")
        input_ids = torch.tensor([list(ids)], dtype=torch.long)
        batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        add_image_inputs(
            batch, [None], processor=self.processor, names=["the prompt"], with_pixels=True
        )
        return batch

    def _check_size(self, num_letters: int, param: str) -> None:
        """Refuses what is too long by its letters alone: tokenizing takes seconds for megabytes."""
        if self.max_length is None or num_letters <= self.max_length * self.longest_token:
            return
        raise bad_request(
            f"The prompt has {num_letters} letters. The model has {self.max_length} positions for "
            f"tokens, the longest of which has {self.longest_token}. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )

    def _knows_tools(self) -> bool:
        return ChatTemplate.of(self.processor).knows_tools

    def _read_pictures(self, messages: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
        urls = [
            part["image_url"]["url"]
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        if urls and ImageExpander.of(self.processor) is None:
            raise bad_request(
                "The model reads text alone: leave the images out.",
                param="messages",
                code="unsupported_parameter",
            )
        return read_pictures(urls, **self.pictures)

    def _refused(self, error: UserError) -> ApiError:
        """Without names of folders of this machine."""
        text = str(error)
        for name in {str(getattr(self.tokenizer, "name_or_path", "") or "")} - {""}:
            text = text.replace(repr(name), "the model").replace(name, "the model")
        if not isinstance(error, DataError):
            text = text.partition(". A template that")[0].partition(": use ")[0]
        return bad_request(f"The messages can't be given to the model: {text}", param="messages")


def _num_letters(message: Mapping[str, Any]) -> int:
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as rows of data have it; of no use for the template is what a reader sets."""
    kept = {name: value for name, value in message.items() if value not in (None, [])}
    kept["role"] = _ROLES.get(message["role"], message["role"])
    kept.setdefault("content", "")
    return kept
