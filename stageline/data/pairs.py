"""Two answers to one question, of which one was chosen: a sample becomes two of the usual kind."""

from typing import Any

from stageline.data.batch import Sample, sample_name
from stageline.errors import DataError

ANSWERS = ("chosen", "rejected")


def both_answers(sample: Sample) -> list[Sample]:
    """The question with the chosen answer, and with the rejected one; nothing else is learnt.

    `chosen` and `rejected` are lists of messages that go on from `messages`; texts stand for one
    message of the assistant or, in a row without messages, for the field `answer`.

    Raises:
        DataError: one is missing or of another kind.
    """
    return [_with_answer(sample, name) for name in ANSWERS]


def _with_answer(sample: Sample, name: str) -> Sample:
    answer = sample.get(name)
    rest = {key: value for key, value in sample.items() if key not in ANSWERS}
    messages = sample.get("messages")
    if messages is None:
        text = _text_of(answer)
        if text is None:
            raise bad_row(sample, name, answer, "text, or one assistant message")
        return {**rest, "answer": text}
    told = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not isinstance(told, list) or not any(map(is_answer, told)):
        raise bad_row(sample, name, answer, "text, or a list of messages with an assistant's")
    if not isinstance(messages, list):
        raise bad_row(sample, "messages", messages, "a list of messages, the prompt")
    return {**rest, "messages": [*map(unlearnt, messages), *told]}


def _text_of(answer: Any) -> str | None:
    if isinstance(answer, list) and len(answer) == 1 and is_answer(answer[0]):
        answer = answer[0].get("content")
    return answer if isinstance(answer, str) else None


def is_answer(message: Any) -> bool:
    """Whether a message is the assistant's."""
    return isinstance(message, dict) and message.get("role") == "assistant"


def unlearnt(message: Any) -> Any:
    """The message; of the assistant as one that is not learnt."""
    return {**message, "weight": 0} if is_answer(message) else message


def bad_row(sample: Sample, name: str, value: Any, expected: str) -> DataError:
    """The error for a field that is missing or of another kind."""
    what = "is missing" if value is None else f"is {str(value)[:200]!r}"
    return DataError(
        f"{sample_name(sample)}: {name!r} {what}. Expected is {expected}, because a preference "
        "says which answer to a prompt is better: correct the row, or use a --collate-fn that "
        "fits it (dpo, rm: messages or question, chosen, rejected; kto: messages or question "
        "and answer, label)."
    )
