"""Refuse, cut or drop a sample that is longer than the context.

Image tokens are never cut, and answers only with `share`, which divides the context between prompts
and answers as LLaMA-Factory's cutoff_len does, number for number: a short answer stays whole and
its prompt is cut, or the other way round, else both in proportion; pair after pair takes from what
is left. Unlike LLaMA-Factory, only text from the data is cut.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, NamedTuple

from stageline.data.text.encode import Encoded
from stageline.errors import DataError

ChatOverlong = Literal["error", "cut_prompt", "share", "drop"]
TextOverlong = Literal["error", "cut", "drop"]
Overlong = ChatOverlong | TextOverlong
DROPPING = ("drop", "share")  # choices that may leave nothing of a sample
_has_warned: set[tuple[str, bool]] = set()


def share_budget(num_source: int, num_target: int, budget: int) -> tuple[int, int]:
    """Return how many tokens of a prompt and of its answer are kept, which may be none.

    The rule of `infer_seqlen` in LLaMA-Factory.
    """
    if 2 * num_target < budget:
        most_target = budget
    elif 2 * num_source < budget:
        most_target = budget - num_source
    else:
        most_target = int(budget * (num_target / (num_source + num_target)))
    kept_target = min(most_target, num_target)
    return min(max(budget - kept_target, 0), num_source), kept_target


class _Pair(NamedTuple):
    """Tokens from `start` on are the prompt, from `answer` on the answer, up to `end`."""

    start: int
    answer: int
    end: int


def share_places(encoded: Encoded, budget: int) -> list[int] | None:
    """Return which tokens are kept of a sample that is longer than `budget`.

    Pairs come in order; where only the last answer is in the loss, from the last one backwards, and
    earlier ones get what is left. A cut answer loses the token that ends its turn. None: no
    supervised token or not all images would be left.
    """
    if not encoded.is_text:  # made elsewhere: its answers are not known to be text
        encoded = replace(encoded, is_text=encoded.is_cuttable)
    # each answer with all before it; what comes after the last one belongs to it
    pairs: list[_Pair] = []
    start = place = 0
    for is_answer, run in groupby(encoded.is_answer or encoded.is_target):
        end = place + len(list(run))
        if is_answer:
            pairs.append(_Pair(start, place, end))
            start = end
        place = end
    if pairs:
        pairs[-1] = pairs[-1]._replace(end=len(encoded))
    learnt = [any(encoded.is_target[pair.answer : pair.end]) for pair in pairs]
    if len(pairs) > 1 and learnt == [False] * (len(pairs) - 1) + [True]:
        pairs = pairs[::-1]
    kept: list[int] = []
    if len(pairs) > 1 and pairs[-1].start == 0:
        # a token that begins the text and comes nowhere else stays, also without the first pair
        ids = encoded.input_ids
        kept = [0] if not encoded.is_text[0] and ids.count(ids[0]) == 1 else []
    budget -= len(kept)
    for pair in pairs:
        chosen = _kept_of(encoded, pair, budget, without=kept)
        if not chosen:
            break
        kept += chosen
        budget -= len(chosen)
    kept.sort()
    has_target = any(encoded.is_target[place] for place in kept[1:])
    gone = set(range(len(encoded))).difference(kept) if encoded.is_image else ()
    has_images = not any(encoded.is_image[place] for place in gone)
    return kept if has_target and has_images else None


def _kept_of(encoded: Encoded, pair: _Pair, budget: int, *, without: Sequence[int]) -> list[int]:
    """Return the kept tokens of a pair; none where what cannot be cut does not fit."""
    source = [place for place in range(pair.start, pair.answer) if place not in without]
    target = list(range(pair.answer, pair.end))
    if len(source) + len(target) <= budget:
        return source + target
    num_source, num_target = share_budget(len(source), len(target), budget)
    fixed = sum(not encoded.is_text[place] for place in source)
    num_source = max(num_source, fixed)
    num_target = min(num_target, budget - num_source)
    # up to the last token from the data; behind it is the end of the turn
    text = [number for number, place in enumerate(target, start=1) if encoded.is_text[place]]
    inside = target[: text[-1]] if text else target
    least = sum(not encoded.is_text[place] for place in inside)  # the template writes them
    if num_target < least:
        num_source -= least - num_target
        num_target = least
    if num_source < fixed or num_target <= 0:
        return []

    def cut(places: Sequence[int], length: int) -> list[int]:
        """Take away the last tokens of text."""
        surplus = max(len(places) - length, 0)
        texts = [place for place in places if encoded.is_text[place]]
        gone = set(texts[len(texts) - surplus :])
        return [place for place in places if place not in gone]

    is_whole = num_target >= len(inside)
    answer = target[:num_target] if is_whole else cut(inside, num_target)
    return cut(source, num_source) + answer


def limit_length(
    encoded: Encoded,
    *,
    max_token_num: int,
    overlong: Overlong,
    name: str,
    pad_token_id: int = 0,
    warn: bool = True,
) -> Encoded:
    """Bring one sample to at most `max_token_num` tokens; say so once per way with `warn`.

    Args:
        overlong: `error` refuses a longer sample. `cut_prompt` takes text from the data out of
            the prompt, its beginning first; the template's text, images and answers stay. `share`
            cuts the ends of prompts and answers; what would have nothing to learn then is
            dropped. `drop` puts a row without labels in its place, so that the number of rows
            stays. `cut` keeps the beginning of plain text, without EOS.
    """
    if len(encoded) <= max_token_num:
        return encoded
    lengths = (
        f"{len(encoded)} tokens, {sum(encoded.is_target)} of them the answer, do not fit "
        f"`max_token_num` {max_token_num}"
    )
    surplus = len(encoded) - max_token_num
    cuttable = [place for place, may_go in enumerate(encoded.is_cuttable) if may_go]
    kept: list[int] | None = None
    what = ""
    if overlong == "share":
        kept = share_places(encoded, max_token_num)
        num_kept = sum(encoded.is_target[place] for place in kept or ())
        what = f" is cut to {len(kept or ())} tokens, {num_kept} of them the answer"
        if num_kept < sum(encoded.is_target):
            what += ", so it has lost its end, and the model learns none there"
    elif overlong == "cut":
        kept, what = list(range(max_token_num)), f" keeps its first {max_token_num} tokens"
    elif overlong == "cut_prompt" and len(cuttable) >= surplus:
        gone = set(cuttable[:surplus])
        kept = [place for place in range(len(encoded)) if place not in gone]
        what = f": the first {surplus} tokens of its prompt's {len(cuttable)} from the data are cut"
    is_dropped = kept is None and overlong in DROPPING
    if is_dropped:
        what = " is dropped"
        if overlong == "share":
            lengths += ", and with a share for each nothing to learn would be left"
    if warn and (is_dropped or kept is not None) and (overlong, is_dropped) not in _has_warned:
        _has_warned.add((overlong, is_dropped))
        text = f"{name}{what}: {lengths}. Further ones are not reported."
        warnings.warn(text, stacklevel=3)
    if is_dropped:
        return Encoded([pad_token_id], [False], [False])
    if kept is not None:
        return encoded.keep(kept)
    raise DataError(
        f"{name}: {lengths}, and only {len(cuttable)} tokens of its prompt may be cut. Raise "
        f"`max_token_num` to {len(encoded)}, shorten the row, or use `collate_fn.overlong` cut "
        "(plain text), cut_prompt, share or drop."
    )
