"""A small tokenizer for an InternVL of our own, trained on the text of its task."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NAMES = ("<|pad|>", "<|bos|>", "<|eos|>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>")


def train_internvl_tokenizer(
    texts: Iterable[str], *, pre_tokenizer: Any, vocab_size: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the names of InternVL's processor; other text is read by its bytes.

    Args:
        pre_tokenizer: cuts a text into words, and these into bytes.
        vocab_size: at most so many tokens.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(NAMES),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=NAMES[0],
        bos_token=NAMES[1],
        eos_token=NAMES[2],
        extra_special_tokens={
            "context_image_token": NAMES[3],
            "start_image_token": NAMES[4],
            "end_image_token": NAMES[5],
            "video_token": NAMES[6],
        },
    )
