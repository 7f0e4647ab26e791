"""Small tokenizers made here, of the kinds that real models have: byte-level BPE and Metaspace."""

from collections.abc import Sequence
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = (
    "Which digit is this? What digit do you see? Which number is written here? Answer: 7",
    "Is the statement true or false? The cat is left of the dog. Question: yes, no and not",
    "system\nYou are a helpful assistant.\nuser\nassistant\n",
)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] | trim }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer(
    texts: Sequence[str] = TEXTS,
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    vocab_size: int = 400,
    adds_bos: bool = False,
    chat_template: str | None = CHATML,
    eos_token: str = "</s>",
    **options: Any,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as GPT-2, Llama 3 and Qwen have; special tokens get ids 0, 1, ...

    Args:
        texts: what it learns its merges from.
        adds_bos: put "<s>" before each text.
        options: more arguments of the class.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if adds_bos:
        _add_bos(backend)
    return _wrap(backend, eos_token=eos_token, chat_template=chat_template, **options)


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
    """A tokenizer that writes spaces as a low line, as Llama 2, Mistral and Gemma have.

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
    if adds_bos:
        _add_bos(backend)
    options["unk_token"] = "<unk>"
    return _wrap(backend, eos_token="</s>", chat_template=chat_template, **options)


def _add_bos(backend: Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )


def _wrap(
    backend: Tokenizer, *, eos_token: str, chat_template: str | None, **options: Any
) -> PreTrainedTokenizerFast:
    options.setdefault("model_input_names", ["input_ids", "attention_mask"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token=eos_token,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        **options,
    )
