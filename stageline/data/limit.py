"""What happens to a sample that is longer than the context: refuse it, cut it, drop it.

Image tokens are never cut, and answers only where prompt and answer share the room. A plain text,
which has no answer, may lose its end.
"""

import warnings
from typing import Literal

from stageline.data.encode import Encoded
from stageline.data.share import share_places
from stageline.errors import DataError

ChatOverlong = Literal["error", "cut_prompt", "share", "drop"]
PairOverlong = Literal["error", "cut_prompt", "drop"]  # both rows of a pair keep the same prompt
TextOverlong = Literal["error", "cut", "drop"]
Overlong = ChatOverlong | TextOverlong
DROPPING = ("drop", "share")  # what may leave nothing of a sample
_has_warned: set[str] = set()


def limit_length(
    encoded: Encoded,
    *,
    max_token_num: int,
    overlong: Overlong,
    name: str,
    pad_token_id: int = 0,
    warn: bool = True,
) -> Encoded:
    """Brings one sample to at most `max_token_num` tokens.

    Args:
        overlong: `error` refuses a longer sample. `cut_prompt` takes text from the data out of
            the prompt, its beginning first; the template's text, images and answers stay. `share`
            cuts the ends of prompts and answers, by the rule of share.py; what would have nothing
            to learn then is dropped. `drop` puts a row without labels in its place, so that the
            number of rows stays. `cut` keeps the beginning, for plain text: what it was cut at is
            no end, so EOS goes with the rest.
        name: of the sample, for errors.
        warn: say so (once per way) when a sample is changed.

    Raises:
        DataError: the sample is too long and may not, or cannot, be cut.
    """
    surplus = len(encoded) - max_token_num
    if surplus <= 0:
        return encoded
    kept = share_places(encoded, max_token_num) if overlong == "share" else None
    if kept is not None:
        if warn:
            _warn_once("share", _shared(encoded, kept, max_token_num, name))
        return encoded.keep(kept)
    if overlong in DROPPING:
        if warn:
            why = ", and with a share for each nothing to learn would be left"
            _warn_once(
                f"{overlong}, drop",
                f"{name} is dropped: {_lengths(encoded, max_token_num)}"
                f"{why if overlong == 'share' else ''}",
            )
        return Encoded([pad_token_id], [False], [False])
    if overlong == "cut":
        if warn:
            lengths = _lengths(encoded, max_token_num)
            _warn_once("cut", f"{name} keeps its first {max_token_num} tokens: {lengths}")
        return encoded.keep(list(range(max_token_num)))
    cuttable = [place for place, may_go in enumerate(encoded.is_cuttable) if may_go]
    if overlong == "cut_prompt" and len(cuttable) >= surplus:
        if warn:
            _warn_once(
                "cut_prompt",
                f"{name}: the first {surplus} tokens of its prompt's {len(cuttable)} from the data "
                f"are cut: {_lengths(encoded, max_token_num)}",
            )
        gone = set(cuttable[:surplus])
        return encoded.keep([place for place in range(len(encoded)) if place not in gone])
    raise DataError(_too_long(encoded, max_token_num, name, len(cuttable), overlong))


def _lengths(encoded: Encoded, max_token_num: int) -> str:
    return (
        f"{len(encoded)} tokens, {sum(encoded.is_target)} of them the answer, do not fit "
        f"--max-token-num {max_token_num}"
    )


def _shared(encoded: Encoded, kept: list[int], max_token_num: int, name: str) -> str:
    targets = sum(encoded.is_target[place] for place in kept)
    is_cut = targets < sum(encoded.is_target)
    end = ", so it has lost its end, and the model learns none there" if is_cut else ""
    return (
        f"{name} is cut to {len(kept)} tokens, {targets} of them the answer{end}: "
        f"{_lengths(encoded, max_token_num)}"
    )


def _too_long(
    encoded: Encoded, max_token_num: int, name: str, num_cuttable: int, overlong: Overlong
) -> str:
    if num_cuttable == 0 and overlong == "error":
        cure = (
            "--collate-fn.overlong drop leaves such samples out, and with --collate-fn pt "
            "--collate-fn.overlong cut keeps the beginning of a text"
        )
        return _refusal(encoded, max_token_num, name, cure)
    cure = (
        f"--collate-fn.overlong cut_prompt would cut up to {num_cuttable} tokens from the "
        "beginning of its prompt's text, --collate-fn.overlong share cuts prompt and answer, "
        "--collate-fn.overlong drop leaves such samples out"
        if overlong == "error"
        else f"only {num_cuttable} tokens of its prompt may be cut, --collate-fn.overlong drop "
        "leaves such samples out"
    )
    return _refusal(encoded, max_token_num, name, cure)


def _refusal(encoded: Encoded, max_token_num: int, name: str, cure: str) -> str:
    return (
        f"{name}: {_lengths(encoded, max_token_num)}. A sample has to fit as a whole, because a "
        f"cut answer would teach a wrong end and cut image tokens break the model. Raise "
        f"--max-token-num to {len(encoded)}, or shorten the row; {cure}."
    )


def _warn_once(kind: str, message: str) -> None:
    if kind not in _has_warned:
        _has_warned.add(kind)
        warnings.warn(f"{message}. Further ones are not reported.", stacklevel=4)
