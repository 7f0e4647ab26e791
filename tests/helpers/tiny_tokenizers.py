"""Small tokenizers of the kind that writes spaces as a low line."""

from collections.abc import Sequence
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_models import CHATML, SPECIAL_TOKENS, TEXTS, wrap_tokenizer


def tiny_metaspace_tokenizer(
    texts: Sequence[str] = TEXTS,
    *,
    prepend_scheme: Literal["always", "first", "never"] = "first",
    kind: Literal["bpe", "unigram"] = "bpe",
    adds_bos: bool = True,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    chat_template: str | None = CHATML,
    **options: Any,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes spaces as a low line, as Llama 2, Mistral and Gemma have.

    Args:
        prepend_scheme: which sections of the text begin with a low line.
        options: more arguments of the class.
    """
    specials = ["<unk>", *special_tokens]
    if kind == "bpe":
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
        trainer: Any = trainers.BpeTrainer(
            vocab_size=300, special_tokens=specials, show_progress=False
        )
    else:
        backend = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=specials, unk_token="<unk>", show_progress=False
        )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    backend.train_from_iterator(texts, trainer)
    options["unk_token"] = "<unk>"
    return wrap_tokenizer(
        backend, adds_bos=adds_bos, eos_token="</s>", chat_template=chat_template, **options
    )
