"""How good one answer is: what the shipped rewards judge by. Plain texts and numbers.

Nothing is evaluated: numbers are read by a pattern and kept as fractions, and a pattern of the
user's gets a time limit, since a long answer can make one search for hours.
"""

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import regex  # transformers brings it; unlike re it can be given a time limit

from stageline.errors import DataError, UserError
from stageline.tasks.answer_text import normalize, parse_choice

Sample = Mapping[str, Any]
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S | re.I)
_THOUGHT = re.compile(r".*</think>", re.S | re.I)
# a hyphen behind a word or a number is no sign: "10-15" ends with 15
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?"
    r"(?:(?:\d{1,3}(?:,\d{2,3}){0,12},\d{3}(?!\d)|\d{1,41})(?:\.\d{0,40})?|\.\d{1,40})"
    r"(?:e[-+]?\d{1,3})?(?:/\d{1,40})?(?:[ \xa0]?\\?(%))?",
    re.I,
)
_OUT_OF_TEN = re.compile(r"\s*(?:/|out of)\s*10\b", re.I)
PATTERN_SECONDS = 0.2  # for one answer


def said(completion: str) -> str:
    """What an answer says in the end: in its last <answer> tag, else behind its thoughts."""
    tagged = _ANSWER.findall(completion)
    return tagged[-1].strip() if tagged else _THOUGHT.sub("", completion).strip()


def references(sample: Sample) -> list[str]:
    """The answers that count as right; of messages the last turn, if it is the assistant's.

    Raises:
        DataError: the row has none.
    """
    own = sample.get("answer")
    told = sample.get("answers") or [_last_turn(sample) if own is None else own]
    told = [told] if isinstance(told, str) else told if isinstance(told, list | tuple) else []
    found = [one for one in told if one is not None]
    if not found:
        raise DataError(
            f"sample {sample.get('source') or sample.get('id')} has neither `answer` nor "
            "a list of `answers`, nor messages that end with the assistant's. One was expected, "
            "because what the model said is compared with it: add the field, or choose a metric, "
            "or rewards (format, length), that need none."
        )
    return [str(one) for one in found]


def _last_turn(sample: Sample) -> str | None:
    """The text of the last message, which is left out where the model is asked for it."""
    messages = sample.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return None
    parts = last.get("content")
    if isinstance(parts, list):
        parts = "".join(part.get("text", "") for part in parts if isinstance(part, dict))
    return parts or None


def is_answer(completion: str, sample: Sample) -> bool:
    """Whether an answer is the right one and nothing else, but for case and punctuation."""
    return normalize(said(completion)) in [normalize(one) for one in references(sample)]


def number_in(text: str) -> Fraction | None:
    """The last number of a text; 1,200.5, 3/4, 40% and 1e-3 are numbers."""
    for found in reversed(list(_NUMBER.finditer(text[-4000:].replace("\u2212", "-")))):
        whole, _, below = found[0].rstrip("% \xa0\\").replace(",", "").partition("/")
        try:
            value = Fraction(whole) / Fraction(below or 1)
        except (ValueError, ZeroDivisionError):
            continue
        return value / 100 if found[1] else value
    return None


def is_near(completion: str, sample: Sample, *, tolerance: float, is_relative: bool) -> bool | None:
    """Whether the number that an answer ends with is close to a right one; None: there is none."""
    value = number_in(said(completion))
    if value is None:
        return None
    for reference in references(sample):
        right = number_in(reference)
        if right is None:
            raise DataError(
                f"sample {sample.get('source') or sample.get('id')}: the answer {reference!r} "
                "holds no number. One was expected, because the reward number compares with it: "
                "correct the row, or use another reward."
            )
        most = Fraction(tolerance) * (abs(right) if is_relative else 1)
        if abs(value - right) <= most:
            return True
    return False


def is_choice(
    completion: str, sample: Sample, *, read: Callable[..., int | None] = parse_choice
) -> bool:
    """Whether an answer names the right option, by its letter or its text."""
    right, choices = right_choice(sample, read=read), list(map(str, sample["choices"]))
    return read(said(completion), choices, question=sample.get("question")) == right


def right_choice(sample: Sample, *, read: Callable[..., int | None] = parse_choice) -> int:
    """The place of the right one of a sample's `choices`.

    It is `answer_index`, or `answer` by its text, as a place itself, or by its letter.

    Args:
        read: text, choices -> the place of the choice that the text names.

    Raises:
        DataError: there is none.
    """
    choices = list(map(str, sample.get("choices") or ()))
    if not choices:
        raise DataError(
            f"sample {sample.get('source') or sample.get('id')} has no `choices`. A list was "
            "expected, because the right one is looked for in it: add the field, or choose a "
            "metric, or rewards, that need none."
        )
    right: Any = sample.get("answer_index")
    answer = (sample.get("answers") or [sample.get("answer")])[0]
    if right is None and answer is not None:
        text = str(answer)
        right = choices.index(text) if text in choices else answer
        right = right if type(right) is int else read(text, choices)
    place = str(right).removesuffix(".0")  # a table with gaps has floats
    if not place.isdecimal() or int(place) >= len(choices):
        raise DataError(
            f"sample {sample.get('source') or sample.get('id')}: the answer is {answer!r}, its "
            f"place {right!r}, and the choices are {choices!r}. One of them was expected, because "
            "it is the right one: correct the row, or give its place, the first being 0, as "
            "`answer_index`."
        )
    return int(place)


def has_tags(completion: str, tags: Sequence[str]) -> bool:
    """Whether an answer is these tags, each once and in this order, and nothing around them."""
    rest = completion.strip()
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if completion.count(start) != 1 or completion.count(end) != 1:
            return False
        head, _, rest = rest.partition(end)
        if not head.strip().startswith(start):
            return False
    return not rest.strip()


def fits(completion: str, pattern: str) -> bool | None:
    """Whether the whole answer is what a regular expression says; None: it took too long."""
    try:
        return regex.fullmatch(pattern, completion, timeout=PATTERN_SECONDS) is not None
    except TimeoutError:
        return None
    except regex.error as error:
        raise UserError(
            f"`reward` format: the pattern {pattern!r} is no regular expression ({error}). One "
            "was expected, because whole answers are compared with it: correct it."
        ) from error


def length_reward(num_tokens: int, *, longest: int, margin: int) -> float:
    """0 up to `margin` below the longest, then in a straight line to -1 (arXiv 2503.14476)."""
    over = num_tokens - (longest - margin)
    return 0.0 if over <= 0 else -1.0 if margin == 0 else max(-1.0, -over / margin)


def side_by_side(
    function: Callable[..., Any], *columns: Sequence[Any], most: int = 16
) -> list[Any]:
    """What a function gives for each row, of which so many are at work at a time.

    Python waits for the threads of a pool when it ends: these it leaves, so that a run which is
    stopped does not wait for what was asked of another machine.

    Raises:
        BaseException: what the function raised first.
    """
    rows = list(zip(*columns, strict=True))
    found: list[Any] = [None] * len(rows)
    errors: list[BaseException] = []
    left = iter(range(len(rows)))  # one step of it is one step for all threads

    def work() -> None:
        try:
            for place in left:
                found[place] = function(*rows[place])
                if errors:
                    return
        except BaseException as error:  # told in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in rows[:most]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def judged(
    url: str,
    model: str,
    key: str | None,
    prompt: str,
    completion: str,
    reference: str,
    seconds: float,
) -> float | None:
    """What a judge behind an OpenAI-style API gives, from 0 to 1; None: it said no number."""
    question = (
        "Rate the answer from 0 (wrong) to 10 (right and complete). Say the number alone.\n\n"
        f"Question:\n{prompt}\n\nRight answer:\n{reference}\n\nAnswer:\n{completion}"
    )
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
    }
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=seconds) as reply:
        text = json.load(reply)["choices"][0]["message"]["content"]
    value = number_in(_OUT_OF_TEN.sub("", str(text)))  # a judge may say "8/10" all the same
    return None if value is None else min(max(float(value), 0.0), 10.0) / 10
