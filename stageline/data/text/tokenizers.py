"""A copy of a fast tokenizer to which special tokens are plain text; and tokens that are added.

The copy is for text from the data: "<|im_end|>" in it becomes the characters < | i m ..., never
the token. Tokens are added as ordinary ones, which stay in decoded text; their rows in the model
are made in `modules/new_rows.py`.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from stageline.data.text.processor import get_tokenizer, load_processor
from stageline.errors import CheckpointError, UserError

# marks that a special token came before; only the copied tokenizer parses it, then it is dropped
ANCHOR = "\ue0f0anchor\ue0f1"


class PlainTokenizer:
    """Encodes runs of text between special tokens as the tokenizer would, less special tokens."""

    def __init__(self, tokenizer: Any, reserved: dict[str, int]) -> None:
        self._reserved = reserved  # text -> id of tokens that must not be made from text
        flags = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        choices = []  # a reserved token with the space that it swallows; the longest wins
        for text in sorted(reserved, key=len, reverse=True):
            before, after = (
                r"\s*" if getattr(flags.get(text), side, False) else ""
                for side in ("lstrip", "rstrip")
            )
            choices.append(before + re.escape(text) + after)
        self._pattern = re.compile(f"({'|'.join(choices)})" if choices else "(?!)")
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["post_processor"] = state["truncation"] = state["padding"] = None
        _hide_reserved(state, reserved)
        self._backend = Tokenizer.from_str(json.dumps(state))
        self._backend.add_special_tokens([AddedToken(ANCHOR, normalized=False, special=True)])

    def encode(self, run: str, *, is_first: bool) -> list[tuple[int, int, int]]:
        """Return (id, start, end) of each token of a run of text.

        Args:
            is_first: the run begins the text. Tokenizers that mark the beginnings of words
                (Metaspace) treat it differently from a run after a special token.
        """
        lead = "" if is_first else ANCHOR
        encoding = self._backend.encode(lead + run, add_special_tokens=False)
        pairs = list(zip(encoding.ids, encoding.offsets, strict=True))[int(not is_first) :]
        return [
            (token_id, max(start - len(lead), 0), max(end - len(lead), 0))
            for token_id, (start, end) in pairs
        ]

    def split_reserved(self, text: str) -> list[str]:
        """Cut the template's text at its reserved tokens."""
        return [part for part in self._pattern.split(text) if part]

    def reserved_id(self, part: str) -> int | None:
        """Return the id, if a part of `split_reserved` is a reserved token."""
        is_reserved = self._pattern.fullmatch(part) is not None
        return self._reserved.get(part, self._reserved.get(part.strip()) if is_reserved else None)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the texts; the longest wins."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("(?:" + "|".join(map(re.escape, longest_first)) + ")")


def _hide_reserved(state: dict[str, Any], reserved: dict[str, int]) -> None:
    """Rename reserved tokens to what no text holds; every other token keeps its id.

    They are renamed in the list of added tokens, and in the model's vocabulary as well, because
    Unigram and word models match any entry of their vocabulary.
    """
    model = state["model"]
    hidden = {text: f"\ue0f2{token_id}\ue0f3" for text, token_id in reserved.items()}
    in_merges: set[str] = set()
    for merge in model.get("merges", []):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        in_merges.update((left, right, left + right))
    # an id follows from the place in the list, so only tokens may be taken out of it whose id is
    # that of a vocabulary entry which merges hold in place
    state["added_tokens"] = [
        token | {"content": hidden.get(token["content"], token["content"])}
        for token in state["added_tokens"]
        if not (token["content"] in hidden and token["content"] in in_merges)
    ]
    renamed = {text: name for text, name in hidden.items() if text not in in_merges}
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        model["vocab"] = [[renamed.get(word, word), score] for word, score in vocabulary]
    else:
        model["vocab"] = {renamed.get(word, word): number for word, number in vocabulary.items()}


@dataclass(frozen=True)
class NewTokens:
    """New tokens, and what they were before."""

    ids: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]  # for each token, the ids of its text before it was added
    fresh: frozenset[int]  # ids that the weights' own tokenizer lacks
    rowless: frozenset[int] = frozenset()  # ids in the tokenizer without a row, or a spare one


def add_new_tokens(
    processor: Any, texts: Sequence[str], *, weights_processor: Any | None = None
) -> NewTokens:
    """Add tokens to a processor, in place; one that is there already stays.

    `weights_processor` is that of the folder with the weights, if it is another one.
    """
    tokenizer = get_tokenizer(processor)
    known = _known(tokenizer, texts)
    trained = _known(get_tokenizer(weights_processor or processor), texts)
    pieces = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    if known:  # split them as if none of them had been added
        plain = PlainTokenizer(tokenizer, known)
        runs = [plain.encode(text, is_first=True) for text in texts]
        pieces = [tuple(token for token, _, _ in run) for run in runs]
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in texts if text not in known]
    )
    ids = tuple(tokenizer.convert_tokens_to_ids(list(texts)))
    fresh = {token for token, text in zip(ids, texts, strict=True) if trained.get(text) != token}
    return NewTokens(ids, tuple(pieces), frozenset(fresh))


def with_rowless(
    processor: Any, tokens: NewTokens | None, num_rows: int, *, weights_processor: Any | None = None
) -> NewTokens | None:
    """Return the tokens and all others of the tokenizer without a row of their own in `num_rows`.

    Rows without a token in the folder of the weights (`weights_processor`) are spare.
    """
    ids = set(get_tokenizer(processor).get_vocab().values())
    used = set(range(num_rows))
    if weights_processor is not None:
        used &= set(get_tokenizer(weights_processor).get_vocab().values())
    rowless = tuple(sorted(ids - used - set(tokens.ids if tokens else ())))
    if not rowless:
        return tokens
    before, own = tokens or NewTokens((), (), frozenset()), frozenset(rowless)
    pieces = before.pieces + ((),) * len(rowless)
    return NewTokens(before.ids + rowless, pieces, before.fresh | own, own)


def processor_of_weights(folder: str, *, trust_remote_code: bool = False) -> Any | None:
    """Return the processor in a folder with weights; None: it has none."""
    try:
        return load_processor(folder, trust_remote_code=trust_remote_code)
    except (UserError, CheckpointError):
        return None


def _known(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """Return text -> id of those that are added tokens already."""
    added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
    vocabulary = tokenizer.get_vocab()
    for text in texts:
        is_special = text in tokenizer.all_special_tokens or (text in added and added[text].special)
        if is_special or (text in vocabulary and text not in added):
            what = "a special token" if is_special else "a word of its own vocabulary"
            raise UserError(
                f"`new_tokens` has {text!r}, which the tokenizer has as {what} (id "
                f"{vocabulary[text]}). Choose another text, such as one in angle brackets."
            )
    return {text: vocabulary[text] for text in texts if text in added}
