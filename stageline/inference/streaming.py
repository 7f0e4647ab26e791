"""One answer of a model, handed out piece by piece while it is generated."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from stageline.data.processor import get_pad_token_id, get_tokenizer
from stageline.inference.generation import stop_token_ids

Write = Callable[[str], object]
_UNFINISHED = "\ufffd"  # a decoder's sign for a character whose last bytes are still to come


class TokenWriter(BaseStreamer):
    """Takes the library's tokens as they come and writes the text that they add.

    All tokens are decoded together each time: a decoder may treat the first token of a text in a
    way of its own, so pieces decoded one by one would lose spaces.
    """

    def __init__(self, tokenizer: Any, write: Write, *, stop_ids: list[int]) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.stop_ids = stop_ids
        self.token_ids: list[int] = []
        self.written = ""
        self._has_prompt = False

    @property
    def text(self) -> str:
        """The answer as far as it is there."""
        return self.tokenizer.decode(self.token_ids, skip_special_tokens=True)

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, then new tokens."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.token_ids += [i for i in value.flatten().tolist() if i not in self.stop_ids]
        text = self.text
        # a space may go when the next token comes (decoders clean up before a full stop)
        self._write_up_to(text if not text.endswith(_UNFINISHED) else "", keeps_spaces=False)

    def end(self) -> None:
        """Writes what was held back."""
        self._write_up_to(self.text, keeps_spaces=True)

    def _write_up_to(self, text: str, *, keeps_spaces: bool) -> None:
        text = text if keeps_spaces else text.rstrip()
        if len(text) > len(self.written) and text.startswith(self.written):
            added, self.written = text[len(self.written) :], text  # Ctrl-C may come while it writes
            self.write(added)


@torch.no_grad()
def stream_answer(
    model: torch.nn.Module,
    processor: Any,
    batch: dict[str, torch.Tensor],
    *,
    write: Write,
    max_new_tokens: int,
    temperature: float = 0.0,
    repetition_penalty: float = 1.0,
    **sampling: object,
) -> tuple[str, bool]:
    """Answers the one prompt of a batch.

    Args:
        batch: of `encode_prompts`.
        write: gets each piece of text.
        temperature: 0 takes the likeliest token.
        sampling: with a temperature, further options of the library's `generate` such as top_p.

    Returns:
        The whole answer, and whether Ctrl-C stopped it.
    """
    tokenizer = get_tokenizer(processor)
    stop_ids = stop_token_ids(model, tokenizer)
    writer = TokenWriter(tokenizer, write, stop_ids=stop_ids)
    device = model.get_input_embeddings().weight.device
    if temperature > 0:
        sampling = {**sampling, "temperature": temperature, "do_sample": True}
    else:
        sampling = {"do_sample": False}
    try:
        model.generate(
            **{
                name: value.to(device, model.dtype if value.is_floating_point() else None)
                for name, value in batch.items()
            },
            pad_token_id=get_pad_token_id(processor),
            eos_token_id=stop_ids or None,
            max_new_tokens=max_new_tokens,
            repetition_penalty=repetition_penalty,
            streamer=writer,
            **sampling,
        )
    except KeyboardInterrupt:
        writer.end()
        return writer.text, True
    return writer.text, False
