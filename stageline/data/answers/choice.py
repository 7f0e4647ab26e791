"""Reads which of some options an answer names (rules 14 to 17)."""

import re
from collections.abc import Callable, Sequence

from stageline.data.answers.directions import parse_directions
from stageline.data.answers.negation import without_negated
from stageline.data.answers.numbers import is_clock, parse_angle, parse_clock
from stageline.data.answers.text import clean, contains_words, read_answer, tidy, without_question
from stageline.data.answers.truth import parse_truth

Parse = Callable[[str], int | None]

_OUTSIDE = -1  # an option was named that is none
_ONLY = re.compile(r"\(?([a-z])\)?[.):]?")
_FIRST = re.compile(r"(?:^|\n)\s*(?:\(([a-z])\)|([a-z])[.):])(?=\s|$)")
_IN_BRACKETS = re.compile(r"(?<!\w)\(([a-z])\)")
# "the answer is a cat" has an article: "a" counts only where nothing follows it
_AFTER = r"(?=\s*(?:[.,:;)!\n]|$|\b(?:is|as|because|since|and|or)\b)|(?<!a)\s)"
_NAMED = re.compile(
    r"\b(?:answer|option|choice|letter|caption|choose|select|pick|go with|it's|it is)"
    rf"(?:\s+is)?\s*:?\s*[\"'(]?([a-z])\b[\"')]?{_AFTER}"
)
_SAID_RIGHT = re.compile(
    r"(?<!\w)\(?([a-z])\)?\s+(?:is|seems|looks|would be)\s+(?:the\s+)?"
    r"(?:correct|right|true|best|answer)\b"
)
_SEVERAL = re.compile(r"(?<!\w)\(?([a-z])\)?\s*(?:or|and|/|&|,|nor)\s*\(?([a-z])\)?(?=[\s.,;!)]|$)")
_LETTERED = re.compile(r"(^|\n|\b(?:is|option|choice|answer)\s*:?\s*)\(?([a-z])[.):][^\S\n]+(?=\w)")
_SMALL_WORDS = re.compile(r"\b(?:a|an|the|is|are|there)\b")


def parse_choice(text: str, choices: Sequence[str], *, question: str | None = None) -> int | None:
    """Which option an answer names: by its letter, by its text, or by words of one direction.

    A letter counts where it can't be a word: alone, "B.", "(B)", "answer is B". It wins over a
    text that contradicts it. Of several options in the text, one that holds the others counts
    ("top left" holds "left"); options after "not" don't.
    """
    options = [tidy(clean(choice)) for choice in choices]
    said = _without_list(without_question(text, question), options)
    if tidy(said) in options:
        return options.index(tidy(said))
    found = read_answer(said, lambda place: _read(place, options))
    return None if found == _OUTSIDE else found


def _read(place: str, options: Sequence[str]) -> int | None:
    said = without_negated(place)
    letters = _letters(said, len(options))
    if len(letters) == 1:
        index = ord(letters.pop()) - ord("a")
        return index if index < len(options) else _OUTSIDE
    if letters:
        return None
    truths = [parse_truth(option) for option in options]
    if sorted(truths, key=str) == [False, True]:
        verdict = parse_truth(place)
        return None if verdict is None else truths.index(verdict)
    return _by_text(said, place, options)


def _letters(said: str, num_options: int) -> set[str]:
    alone = _ONLY.fullmatch(said.strip(" .,;:!?\"'"))
    if alone:
        return {alone[1]}
    pairs = [pair for pair in _SEVERAL.findall(said) if max(pair) < chr(ord("a") + num_options)]
    found = {letter for pair in pairs for letter in pair}
    first = {one or other for one, other in _FIRST.findall(said)}
    if len(first) == 1 and not found:
        return first
    return found.union(first, *(p.findall(said) for p in (_IN_BRACKETS, _NAMED, _SAID_RIGHT)))


def _by_text(said: str, place: str, options: Sequence[str]) -> int | None:
    plain = said.strip(" .,;:!?\"'()\n")
    if plain in options:
        return options.index(plain)
    named = _named(said, options) or _named(_essence(said), [_essence(o) for o in options])
    if all(map(is_clock, options)):
        return _only(options, parse_clock(place), parse_clock)
    angles = [parse_angle(option) for option in options]
    if None not in angles and len(set(angles)) == len(options):
        return _only(options, parse_angle(place), parse_angle)
    directions = parse_directions(place)
    fits = [i for i, option in enumerate(options) if directions and _is(option, directions)]
    # "upper left" has the word of the option "left", and means the option "top left"
    if len(fits) == 1 and all(parse_directions(options[i]) < directions for i in named):
        return fits[0]
    return named[0] if len(named) == 1 else None


def _is(option: str, directions: frozenset[str]) -> bool:
    return parse_directions(option) == directions


def _only(options: Sequence[str], said: int | None, parse: Parse) -> int | None:
    fits = [i for i, option in enumerate(options) if said is not None and parse(option) == said]
    return fits[0] if len(fits) == 1 else None


def _essence(text: str) -> str:
    """Without articles and "is": "the mug is on a table" says the option "A mug on the table"."""
    return re.sub(r"\s+", " ", _SMALL_WORDS.sub(" ", text)).strip()


def _named(said: str, options: Sequence[str]) -> list[int]:
    """Options that stand in the text and are no part of another one that does."""
    found = [i for i, option in enumerate(options) if contains_words(said, option)]
    return [
        i
        for i in found
        if not any(j != i and contains_words(options[j], options[i]) for j in found)
    ]


def _without_list(said: str, options: Sequence[str]) -> str:
    """Takes out the list of the options with their letters, where an answer repeats all of it."""
    patterns = [
        rf"\(?\b{chr(ord('a') + i)}[.):]\s*{re.escape(option)}(?!\w)[.,;]?"
        for i, option in enumerate(options)
    ]
    if len(options) > 1 and all(re.search(pattern, said) for pattern in patterns):
        for pattern in patterns:
            said = re.sub(pattern, "\n", said, count=1)
    # "b. left" is one sentence
    return _LETTERED.sub(r"\1(\2) ", said.strip())
