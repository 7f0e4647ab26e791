"""The text of an answer token by token, against the whole answer decoded at once."""

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stageline.inference.decoding.answer import AnswerText
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

TEXT = "The café: 你好, 世界! 👩‍👩‍👧 naïve — 🇫🇷\n\n  It isn't , is it ? 'no' we 've ... \ufffd end"
PAIRS = [
    "The café: 你好",
    "👩‍👩‍👧",
    "naïve — 🇫🇷\n\n",
    "  It isn't",
    " ' no ' ",
    "we 've .",
    "a , b",
]


def _byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: pieces, else bytes; its decoder strips a space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁The", "▁It", "a", "b", "n", "'", "t", "s", ".", ",", "▁is", ":", "▁we", "caf"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


MAKERS = {
    "bytes": lambda: tiny_tokenizer([*PAIRS]),
    "bytes few merges": tiny_tokenizer,
    "metaspace first": lambda: tiny_metaspace_tokenizer([TEXT, *PAIRS]),
    "metaspace always": lambda: tiny_metaspace_tokenizer([TEXT], prepend_scheme="always"),
    "metaspace never": lambda: tiny_metaspace_tokenizer([TEXT], prepend_scheme="never"),
    "byte fallback": _byte_fallback_tokenizer,
}


@functools.cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    return MAKERS[kind]()


def _decode(kind: str, ids: Sequence[int]) -> str:
    return _tokenizer(kind).decode(list(ids), skip_special_tokens=True)


@st.composite
def _answers(draw, kind: str) -> list[int]:
    """Texts, cut anywhere, with any tokens between: also halves of characters and specials."""
    tokenizer = _tokenizer(kind)
    ids: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.booleans()):
            part = tokenizer.encode(draw(st.sampled_from(PAIRS)), add_special_tokens=False)
            ids += part[draw(st.integers(0, 3)) :][: draw(st.integers(1, 40))]
        else:
            ids += draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=6))
    return ids


def _told(kind: str, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[AnswerText, list[str]]:
    """Return the answer, and the pieces: one a token, then the rest."""
    answer = AnswerText(_tokenizer(kind), tuple(stop), ())
    pieces = []
    for token_id in ids:
        pieces.append(answer.add(token_id))
        if answer.is_stopped:
            break
    return answer, [*pieces, answer.finish()]


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_pieces_make_the_text_of_the_whole(kind, data):
    ids = data.draw(_answers(kind)) * data.draw(st.sampled_from([1, 1, 6]))
    answer, pieces = _told(kind, ids)
    assert "".join(pieces) == answer.text == _decode(kind, ids)
    assert answer.token_ids == ids and not answer.is_stopped and answer.finish() == ""
    at_end = AnswerText(_tokenizer(kind), (), (), grows=False)
    assert not any(map(at_end.add, ids)), "a text that nobody reads yet is not decoded"
    assert at_end.finish() == at_end.text == answer.text and at_end.token_ids == ids
    with_stop = AnswerText(_tokenizer(kind), ("never",), (), grows=False)
    assert "".join([*map(with_stop.add, ids), with_stop.finish()]) == answer.text


@pytest.mark.parametrize(
    "tokens",
    [
        # a run of bytes is right or wrong as a whole, special tokens in it or not
        ["a", "<0xE4>", "<0xBD>", "<0xA0>", "<0xE4>", "b"],
        ["a", "<0xE4>", "<0xBD>", "</s>", "<0xA0>", "b"],
        ["a", "<0xE4>", "<0xBD>", "<0xA0>", "</s>", "<0xE4>"],
        ["▁"] * 30 + ["a"],
        ["</s>"] * 60 + ["▁It"],
        ["a"] * 30 + ["</s>"] * 60 + ["▁It"],
    ],
    ids=len,
)
def test_runs_of_bytes_spaces_and_special_tokens(tokens):
    ids = _tokenizer("byte fallback").convert_tokens_to_ids(tokens)
    answer, _ = _told("byte fallback", ids)
    assert answer.text == _decode("byte fallback", ids)


@pytest.mark.parametrize("kind", ["bytes", "metaspace first", "byte fallback"])
def test_ids_beyond_the_tokenizer_have_no_text(kind):
    """Heads are often padded to a round size: a model may write what no token stands for."""
    tokenizer = _tokenizer(kind)
    word = tokenizer.encode("It is", add_special_tokens=False)
    ids = [*word, *[len(tokenizer) + 7] * 60, *word]
    assert _told(kind, ids)[0].text == _decode(kind, ids) != ""


def _first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Character by character: the first place where the text so far ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@pytest.mark.parametrize("kind", ["bytes", "metaspace first", "metaspace always"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_stop_strings_end_the_text_at_the_first_token_that_completes_one(kind, data):
    ids = data.draw(_answers(kind))
    whole = _decode(kind, ids)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 6))
    pieces_of_it = cuts.map(lambda cut: whole[cut[0] : cut[0] + cut[1]])
    stop = data.draw(st.lists(pieces_of_it | st.sampled_from(PAIRS), min_size=1, max_size=3))
    stop = [one for one in stop if one and "\ufffd" not in one]
    answer, pieces = _told(kind, ids, stop)
    shown = ""
    for number, piece in enumerate(pieces[:-1], start=1):
        shown += piece
        so_far = _decode(kind, ids[:number])
        certain = so_far[: len(so_far) - so_far.endswith("\ufffd")]
        expected = _first_stop(certain, stop)
        if expected:
            assert answer.stopped_by == expected[1] and answer.text == certain[: expected[0]]
            assert answer.token_ids == ids[:number] and number == len(pieces) - 1
            return
        # only text that may begin a stop string is held back
        begun = [n for n in range(len(certain)) if any(s.startswith(certain[n:]) for s in stop)]
        assert shown == certain[: min(begun, default=len(certain))]
    assert not answer.is_stopped and answer.text == whole


def test_a_stop_string_in_a_run_of_bytes_stops_at_once():
    tokenizer = _tokenizer("byte fallback")
    ids = tokenizer.encode("The\n\nIt", add_special_tokens=False)
    answer, pieces = _told("byte fallback", ids, ["\n"])
    assert answer.text == "The" and answer.stopped_by == "\n"
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    assert answer.token_ids == ids[: ids.index(newline) + 1]
    # the run's bytes are a character only together
    smile = tokenizer.encode("a😀b", add_special_tokens=False)
    assert _told("byte fallback", smile, ["😀"])[0].text == "a"
    assert _told("byte fallback", smile, ["😁"])[0].text == "a😀b"


def test_a_stop_token_is_in_neither_tokens_nor_text():
    tokenizer = _tokenizer("bytes")
    ids = tokenizer.encode("The café", add_special_tokens=False)
    plain = tokenizer.encode("!", add_special_tokens=False)[0]
    for stop_id in (tokenizer.eos_token_id, plain):
        answer = AnswerText(tokenizer, ("fée",), (stop_id,))
        pieces = [answer.add(token_id) for token_id in [*ids, stop_id]]
        assert answer.is_stopped and answer.stopped_by == stop_id and answer.token_ids == ids
        # the beginning of the stop string was held back, and is text after all
        assert pieces[-1] == "" and "".join(pieces) == "The ca" and answer.finish() == "fé"
        assert answer.text == "The café"
        with pytest.raises(AssertionError, match="after the answer's end"):
            answer.add(plain)


@pytest.mark.parametrize("kind", ["bytes", "metaspace first", "byte fallback"])
@pytest.mark.parametrize("text", [TEXT, "\ufffd", "    "])
def test_the_work_a_token_does_not_grow_with_the_answer(kind, text, monkeypatch):
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode(text * 40, add_special_tokens=False)[:300]
    decode, numbers = tokenizer.decode, []

    def counted(token_ids, **options):
        numbers.append(len(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    answer = AnswerText(tokenizer, ("never",), ())
    for token_id in ids:
        answer.add(token_id)
    assert sum(numbers) < 30 * len(ids)
    answer.finish()
    assert answer.text == decode(ids, skip_special_tokens=True)


def test_a_special_token_that_is_a_stop_string_stops():
    """It makes no text, so that no text can tell that it came."""
    tokenizer = tiny_tokenizer()
    [special] = [i for i, t in tokenizer.added_tokens_decoder.items() if t.content == "</s>"]
    answer = AnswerText(tokenizer, ("</s>", "never"), ())
    for token_id in [*tokenizer.encode("true", add_special_tokens=False), special]:
        answer.add(token_id)
    answer.finish()
    assert answer.is_stopped and answer.stopped_by == special and answer.text == "true"
