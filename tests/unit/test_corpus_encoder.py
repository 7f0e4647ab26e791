"""Encoders of a corpus: the ids of transformers on every text, by tiktoken or not, and back."""

import random
from pathlib import Path

import numpy
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stageline.corpus import encoder as encoders
from stageline.corpus.encoder import check_texts, load_encoder, tokenizer_fingerprint
from stageline.errors import UserError

pytest.importorskip("tiktoken")

ROOT = Path(__file__).resolve().parents[2]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<filename>"]

ODD = (
    "I'm, you're, he's, we'd, they'll, I've, can't; I'M, YOU'RE, HE'S, WE'D, THEY'LL, I'VE, CAN'T",
    "'s's 's x's'll ''' 'ſ 'S ’s ’ll it ’ s",
    "  two spaces   three    four \t tab\t\ttabs \n newline\n\n\n\r\nCRLF\r\n\r\n\rCR alone \r",
    "\n\n\n   \n\t \n",
    "ends in spaces   ",
    "0 12 123 1234 12345 123456 1234567 3.14159 1,000,000 1e-9 0x7F v2.0.1 a1b2c3   5  7 \n8\n\n9",
    "½ ² ٣ ४५ Ⅷ ⑨ 一二三 １２３ x² y₃  ½\n²",
    "/usr/share/doc/a-b_c.d+e --long-option=VALUE -x <file> || && >> 2>&1 $HOME ${x%%.*} #!/bin/sh",
    "<|endoftext|> <|im_start|>user\nhi<|im_end|> <s></s> <pad> [INST] [/INST] <unk> <|eot_id|>",
    "中文没有空格。下一句！“引号”？！……《书名》，、；：（括号）ＡＢＣ　全角空格",
    "ひらがなカタカナ漢字 한국어 문장입니다. ไทยไม่มีช่องว่าง हिन्दी में संयुक्ताक्षर العربية עברית",
    "é e\u0301 ñ n\u0303 Å ÅÅ ﬁ ﬀ ㎢ ﷺ ǆ ß ẞ İ ı Ωmega µ",
    "😀👍🏽👨‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪🇨🇳 a😀b 😀 😀  😀",
    "\u200b\u200d\ufeff\u00a0\u2003\u3000\u2028\u2029\x85\x0b\x0c\x1c\x1f\u00ad\u180e\u2060",
    "a\u00a0b \u00a0 c\u2003 d \u3000e\x0b\x0cf\x85\x85 g\x1c\x1dh",
    "\x00 nul \x00\x00 \x01\x02\x03\x04\x05\x06\x07\x08\x0e\x0f\x10\x13\x14\x16\x1b\x7f end",
    "\u0378 \ufffe \uffff \U0001f9ff \U000e0001 \U0010ffff \ue000 \U00040000 \U000f0000",
    "a" * 3000 + " " + "=" * 500 + "\n" + "-" * 500 + " " * 700 + "x" + "\n" * 700 + "的" * 700,
)


def _bytes_after(*steps, uses_regex=False, add_prefix_space=False):
    last = pre.ByteLevel(add_prefix_space=add_prefix_space, use_regex=uses_regex)
    return pre.Sequence([*steps, last]) if steps else last


def _split(pattern, behavior="isolated", invert=False):
    return pre.Split(Regex(pattern), behavior, invert)


# shape -> pre-tokenizer, normalizer, kind that is expected
BYTE_LEVEL = {
    "gpt2": (_bytes_after(uses_regex=True), None, "tiktoken"),
    "numbers": (_bytes_after(pre.Digits(False), uses_regex=True), None, "tiktoken"),
    "llama3": (_bytes_after(_split(LLAMA3)), None, "tiktoken"),
    "qwen": (_bytes_after(_split(QWEN)), normalizers.NFC(), "tiktoken"),
    "gpt4o": (_bytes_after(_split(GPT4O, "removed", True)), None, "tiktoken"),
    "prefixed": (_bytes_after(uses_regex=True, add_prefix_space=True), None, "tokenizers"),
    "two_splits": (_bytes_after(_split("[一-龥]+"), _split(LLAMA3)), None, "tokenizers"),
    # possessive for one engine, repeated for the other: the comparison finds it
    "possessive": (_bytes_after(_split(LLAMA3.replace("3}", "3}+"))), None, "tokenizers"),
    "lower_case": (_bytes_after(uses_regex=True), normalizers.Lowercase(), "tokenizers"),
}
OTHERS = ("llama2", "unigram")


def _training_texts():
    return [
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/glossary.zh.md")
    ]


def _byte_level(name):
    pre_tokenizer, normalizer, _ = BYTE_LEVEL[name]
    backend = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    # the real ones lack a few control characters: so does this one, all but what its texts hold
    alphabet = [] if name == "gpt2" else pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=CONTROL, show_progress=False
    )
    backend.train_from_iterator(_training_texts() + list(ODD[:17]), trainer)
    if name == "qwen":  # Qwen has <think> as a token of its own that is not a control token
        backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return backend


def _other(name):
    if name == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        trainer = trainers.UnigramTrainer(
            vocab_size=800,
            special_tokens=["<unk>", *CONTROL],
            unk_token="<unk>",
            show_progress=False,
        )
    else:
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=["<unk>", *CONTROL, *bytes_], show_progress=False
        )
    backend.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=name != "llama2")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    if name == "llama2":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.train_from_iterator(_training_texts(), trainer)
    return backend


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a shape -> folder, made when it is first asked for."""
    made = {}

    def folder(name):
        if name not in made:
            backend = _byte_level(name) if name in BYTE_LEVEL else _other(name)
            wrapped = PreTrainedTokenizerFast(
                tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
            )
            made[name] = tmp_path_factory.mktemp(name) / "tokenizer"
            wrapped.save_pretrained(made[name])
        return made[name]

    return folder


def _texts():
    """Odd texts, each also behind the other, and real ones."""
    odd = [*ODD, *check_texts(None)]
    chance = random.Random(3)
    pairs = ["".join(chance.sample(odd[:17], 2)) for _ in range(40)]
    return [*odd, *pairs, *_training_texts(), "", "x<think>y</think>"]


@pytest.mark.parametrize("name", [*BYTE_LEVEL, *OTHERS])
def test_ids_are_those_of_transformers(folders, name):
    encoder = load_encoder(folders(name))
    reference = AutoTokenizer.from_pretrained(folders(name))
    texts = _texts()
    if name == "unigram":  # there transformers itself takes "</s>" in a text for the control token
        texts = [text for text in texts if not any(token in text for token in CONTROL)]
    expected = reference(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
    found = encoder.encode(texts)
    assert [ids.tolist() for ids in found] == expected["input_ids"]
    assert all(ids.dtype == numpy.uint32 for ids in found)
    kind = BYTE_LEVEL[name][2] if name in BYTE_LEVEL else "tokenizers"
    assert (encoder.kind, bool(encoder.note)) == (kind, kind == "tokenizers"), encoder.note
    control = {reference.convert_tokens_to_ids(token) for token in CONTROL}
    assert not control & set(numpy.concatenate(encoder.encode(_texts())).tolist())


@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama2"])
def test_a_text_comes_back_from_its_ids(folders, name):
    encoder = load_encoder(folders(name))
    texts = _training_texts() + ["two  spaces\r\n\n\tx ", "<s>text</s>", "\ta\u00a0b 中文。"]
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert encoder.decode(ids) == text
        ends = encoder.byte_ends(text, ids)
        assert ends.dtype == numpy.int64 and ends[-1] == len(text.encode())
        assert (numpy.diff(ends) > 0).all()


def test_byte_ends_are_the_lengths_of_the_bytes(folders):
    encoder = load_encoder(folders("llama3"))
    text = "Ein Wörtchen, 😀 und 三 Zeichen: ﷺ\U000e0001."
    (ids,) = encoder.encode([text])
    slow = load_encoder(folders("llama3"), kind="tokenizers")
    reference = Tokenizer.from_file(str(folders("llama3") / "tokenizer.json"))
    # a byte-level token prints each of its bytes as one character
    by_hand = numpy.cumsum([len(reference.id_to_token(i)) for i in ids])
    numpy.testing.assert_array_equal(encoder.byte_ends(text, ids), by_hand)
    numpy.testing.assert_array_equal(slow.byte_ends(text, ids), by_hand)
    # by offsets, as for tokenizers that are not of bytes: they differ only inside a character
    slow.token_bytes = None
    by_offsets = slow.byte_ends(text, ids)
    borders = set(numpy.cumsum([len(char.encode()) for char in text]).tolist())
    for end, offset in zip(by_hand.tolist(), by_offsets.tolist(), strict=True):
        assert end == offset or not {end, offset} & borders


def test_long_runs_take_neither_forever_nor_the_process(folders):
    encoder = load_encoder(folders("gpt2"))
    slow = load_encoder(folders("gpt2"), kind="tokenizers")
    blank = " " * 1_000_000 + "x"  # this much white space crashes tiktoken's expressions
    assert encoder.decode(encoder.encode([blank])[0]) == blank
    texts = ["a" * 50_000, "\n" * 70_000, "ok"]
    for fast, other in zip(encoder.encode(texts), slow.encode(texts), strict=True):
        numpy.testing.assert_array_equal(fast, other)


def test_falls_back_when_real_documents_differ(folders, monkeypatch):
    encoder = load_encoder(folders("llama3"))
    assert encoder.check(_texts()) and encoder.kind == "tiktoken"
    monkeypatch.setattr(encoder._fast, "encode", lambda text: numpy.zeros(1))
    assert not encoder.check(["real documents"])
    assert encoder.kind == "tokenizers" and "real documents" in encoder.note


def test_self_check_finds_a_wrong_expression(folders, monkeypatch):
    monkeypatch.setattr(encoders, "GPT2_PATTERN", r"\w+|\W+")
    assert "other ids" in load_encoder(folders("gpt2")).note
    with pytest.raises(UserError, match="cannot be run by tiktoken exactly.*other ids"):
        load_encoder(folders("gpt2"), kind="tiktoken")


def test_fingerprint_is_of_what_decides_the_ids(folders, tmp_path):
    first = AutoTokenizer.from_pretrained(folders("llama3"))
    print_ = tokenizer_fingerprint(first)
    assert print_ == load_encoder(folders("llama3")).info.fingerprint
    first.add_special_tokens({"additional_special_tokens": ["<image>"]})
    first.padding_side = "left"
    first("a longer text", truncation=True, max_length=1)
    first.save_pretrained(tmp_path / "elsewhere")
    again = AutoTokenizer.from_pretrained(tmp_path / "elsewhere")
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(again) == print_
    first.add_tokens(["word"])
    assert tokenizer_fingerprint(first) != print_
    others = {load_encoder(folders(name)).info.fingerprint for name in ("gpt2", "qwen", "unigram")}
    always = Tokenizer.from_file(str(folders("llama2") / "tokenizer.json"))
    always.pre_tokenizer = pre.Metaspace(prepend_scheme="always", split=False)
    always = PreTrainedTokenizerFast(tokenizer_object=always)
    assert tokenizer_fingerprint(always) == load_encoder(folders("llama2")).info.fingerprint
    assert len({print_, *others}) == 4


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="--tokenizer-path"):
        load_encoder(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no tokenizer.*tokenizer\.json"):
        load_encoder(tmp_path)
