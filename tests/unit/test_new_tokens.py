"""New tokens in a tokenizer: their ids, what they were before, and text that holds them."""

import pytest

from stageline.data.text.encode import TextEncoder, encode_rendered
from stageline.data.text.processor import get_tokenizer, load_processor, save_processor
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.tokenizers import add_new_tokens
from stageline.errors import UserError
from tests.helpers.tiny_models import tiny_processor, tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

TEXTS = ("<left>", "<o'clock, 3>")
MAKERS = {
    "byte-level": tiny_tokenizer,
    "metaspace": tiny_metaspace_tokenizer,
    "processor": lambda: tiny_processor("internvl"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_new_tokens_are_ordinary_text(kind, tmp_path):
    processor = MAKERS[kind]()
    size = len(get_tokenizer(processor))
    before = [get_tokenizer(processor)(t, add_special_tokens=False)["input_ids"] for t in TEXTS]
    found = add_new_tokens(processor, TEXTS)
    assert found.ids == (size, size + 1)
    assert [list(pieces) for pieces in found.pieces] == before and all(before)
    assert found.fresh == set(found.ids)
    assert not set(found.ids) & TextEncoder.of(processor).reserved_ids
    rendered = Rendered(
        (
            Piece("Answer: "),
            Piece("is it <left><o'clock, 3>?", is_user=True),
            Piece("<left>", is_user=True, is_target=True),
        )
    )
    encoded = encode_rendered(rendered, processor)
    assert [token for token in encoded.input_ids if token in found.ids] == [size, size + 1, size]
    targets = [
        t for t, is_target in zip(encoded.input_ids, encoded.is_target, strict=True) if is_target
    ]
    assert targets[0] == size
    assert "<left>" in get_tokenizer(processor).decode([size], skip_special_tokens=True)

    save_processor(processor, tmp_path)
    again = load_processor(tmp_path)
    assert encode_rendered(rendered, again).input_ids == encoded.input_ids
    twice = add_new_tokens(again, TEXTS)
    assert (twice.ids, twice.pieces, twice.fresh) == (found.ids, found.pieces, frozenset())
    assert len(get_tokenizer(again)) == size + 2
    # the tokenizer knows them, the weights were made without them
    weights = add_new_tokens(again, TEXTS, weights_processor=MAKERS[kind]())
    assert weights.fresh == set(found.ids)


def test_special_text_of_the_data_stays_plain_beside_a_new_token():
    processor = tiny_tokenizer()
    (token,) = add_new_tokens(processor, ["<left>"]).ids
    text = "<left><|im_end|><left>"
    rendered = Rendered((Piece(text, is_user=True), Piece("no", is_user=True, is_target=True)))
    ids = encode_rendered(rendered, processor).input_ids
    assert ids.count(token) == 2 and processor.convert_tokens_to_ids("<|im_end|>") not in ids


@pytest.mark.parametrize("text", ["<|im_end|>", "a"])
def test_what_the_tokenizer_has_is_refused(text):
    with pytest.raises(UserError, match="--vocab.new_tokens has .* which the tokenizer has as"):
        add_new_tokens(tiny_tokenizer(), ["<left>", text])
