"""A conversation with a model in this process, and what is dropped when it grows too long."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from stageline.data.batch import render_sample
from stageline.data.processor import get_image_token
from stageline.data.rendered import Rendered
from stageline.errors import UserError
from stageline.inference.dialogue import Dialogue, Message, open_picture, pictures_of
from stageline.inference.generation import encode_prompts
from stageline.inference.streaming import Write, stream_answer

# a prompt_fn part takes a template as well; messages do without
_TEMPLATE = "[QUESTION][ANSWER]"


class ChatSession(Dialogue):
    """Messages so far, and the model that answers the next one.

    Args:
        render: a prompt_fn part, (sample, prompt, processor=, for_generation=) -> Rendered: it
            keeps what users write apart from the template's own tokens.
        image_token: an image_token part, (rendered, images, processor=) -> Rendered; without it
            no pictures are taken.
        answering: options of `stream_answer`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        processor: Any,
        *,
        render: Callable[..., Rendered],
        image_token: Callable[..., Rendered] | None = None,
        **answering: Any,
    ) -> None:
        super().__init__(**answering)
        self.model = model
        self.processor = processor
        self.render = render
        self.image_token = image_token

    @property
    def takes_images(self) -> bool:
        """Whether the model can look at pictures."""
        return self.image_token is not None and get_image_token(self.processor) is not None

    def answer(self, text: str, *, write: Write) -> tuple[str, int]:
        """Asks, and keeps question and answer.

        Args:
            write: gets the answer piece by piece.

        Returns:
            The answer, and how many of the oldest messages had to be forgotten for it.

        Raises:
            UserError: the message alone is too long, or the template cannot write it; the
                conversation is as it was before.
        """
        question = self.question(text)
        batch, num_dropped = self._fitting([*self.messages, question])
        answer, _ = stream_answer(self.model, self.processor, batch, write=write, **self.answering)
        # weight 0: nothing is learnt here, so a template may leave old answers out
        reply = {"role": "assistant", "content": answer, "weight": 0}
        self.messages = [*self.messages[num_dropped:], question, reply]
        self.pictures = []
        return answer, num_dropped

    def encode(self, messages: list[Message]) -> dict[str, torch.Tensor]:
        """Token ids of the prompt that some messages make, with the system's in front."""
        messages = self.with_system(messages)
        images = [open_picture(path) for message in messages for path in pictures_of(message)]
        rendered = render_sample(
            images or None,
            {"id": "chat", "messages": messages},
            prompt=_TEMPLATE,
            prompt_fn=self.render,
            image_token=self.image_token or _without_images,
            processor=self.processor,
            for_generation=True,
        )
        rendered = dataclasses.replace(rendered, name="the conversation")
        return encode_prompts([rendered], [images or None], processor=self.processor)

    def _fitting(self, messages: list[Message]) -> tuple[dict[str, torch.Tensor], int]:
        """The prompt of as many of the newest messages as the model has positions for."""
        config = self.model.config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", None)
        for num_dropped in range(0, len(messages), 2):  # a question with its answer
            batch = self.encode(messages[num_dropped:])
            length = batch["input_ids"].shape[1]
            if most is None or length + self.answering["max_new_tokens"] <= most:
                return batch, num_dropped
        raise UserError(
            f"the message is {length} tokens long with the template, and {most} were expected at "
            f"most together with --max-new-tokens {self.answering['max_new_tokens']}, because the "
            "model has no more positions: shorten it, or lower --max-new-tokens."
        )


def _without_images(rendered: Rendered, images: Any, *, processor: Any) -> Rendered:
    return rendered
