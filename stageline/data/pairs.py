"""Two answers to one question, of which one was chosen: a sample becomes two of the usual kind."""

from collections.abc import Mapping
from typing import Any

from stageline.data.batch import Sample, sample_name
from stageline.errors import DataError

ANSWERS = ("chosen", "rejected")


def both_answers(sample: Mapping[str, Any]) -> tuple[Sample, Sample]:
    """The question with the chosen answer, and with the rejected one.

    `chosen` and `rejected` are lists of messages that go on from `messages`; texts stand for one
    message of the assistant or, in a row without messages, for the field `answer`.

    Raises:
        DataError: one is missing or of another kind.
    """
    shared = {name: value for name, value in sample.items() if name not in ANSWERS}
    chosen, rejected = (_with_answer(shared, name, sample.get(name)) for name in ANSWERS)
    return chosen, rejected


def _with_answer(shared: Sample, name: str, answer: Any) -> Sample:
    messages = shared.get("messages")
    if isinstance(answer, str) and answer:
        if messages is None:
            return {**shared, "answer": answer}
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not answer or not isinstance(messages, list | None):
        raise DataError(
            f"{sample_name(shared)}: `{name}` is {answer!r:.200}. A list of messages that goes on "
            "from `messages`, or a text, was expected, because two answers to one question are "
            "compared: correct the row."
        )
    return {**shared, "messages": [*(messages or []), *answer]}
