"""Predicts all samples of a dataset that the file does not hold yet."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from stageline.data.batch import render_sample
from stageline.errors import DataError
from stageline.evaluation.predictions import PredictionFile

Result = dict[str, Any] | None
Answers = Sequence[Result] | Iterator[tuple[int, Result]]
Answer = Callable[..., Answers]
# fields of a sample that go into its line: enough to compute any metric from the file
KEPT_TYPES = (str, int, float, bool, list, type(None))
KEPT_NAMES = ("groups",)


@dataclass
class Outcome:
    """What became of the samples that were asked for.

    Attributes:
        pending: ids of samples whose answer comes later, from an offline batch.
        failed: id -> why there is no answer.
    """

    pending: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def predict(
    dataset: Any,
    rows: Sequence[int],
    *,
    answer: Answer,
    texts: dict[str, Any],
    processor: Any,
    file: PredictionFile,
    batch_size: int,
) -> Outcome:
    """Answers the given rows in batches and appends them to the file.

    Args:
        answer: (images, prompts) -> for each a dict with `text`, or with `error`, or None while
            it is pending; as a list, or as an iterator of (place, dict) in any order, whose
            answers are written as they come. A model part with its options.
        texts: prompt, prompt_fn and image_token of the run.
    """
    outcome = Outcome()
    waiting = [row for row in rows if str(dataset[row][1]["id"]) not in file.records]
    bar = tqdm(total=len(rows), initial=len(rows) - len(waiting), unit="sample")
    for start in range(0, len(waiting), batch_size):
        pairs = [dataset[row] for row in waiting[start : start + batch_size]]
        prompts = [
            render_sample(images, sample, processor=processor, for_generation=True, **texts)
            for images, sample in pairs
        ]
        answers = answer(images=[images for images, _ in pairs], prompts=prompts)
        for found in _as_they_come(answers):
            records = []
            for place, result in found:
                sample = pairs[place][1]
                if result is None:
                    outcome.pending.append(str(sample["id"]))
                    continue
                if "error" in result:
                    outcome.failed[str(sample["id"])] = result["error"]
                records.append(_record(sample, prompts[place].text, result))
            file.append(records)
            bar.update(len(found))
    bar.close()
    return outcome


def _as_they_come(answers: Answers) -> Iterator[list[tuple[int, Result]]]:
    """A list at once, an iterator one by one."""
    if isinstance(answers, Sequence):
        yield list(enumerate(answers))
        return
    for place, result in answers:
        yield [(place, result)]


def _record(sample: dict[str, Any], prompt: str, result: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: value
        for name, value in sample.items()
        if isinstance(value, KEPT_TYPES) or name in KEPT_NAMES
    }
    others = {name: value for name, value in result.items() if name != "text"}
    record = {"id": str(sample["id"]), "prediction": result.get("text"), "prompt": prompt}
    return {**record, **others, "sample": kept}


def check_ids(dataset: Any, rows: Sequence[int]) -> None:
    """Refuses samples that share an id: the file could not tell their lines apart.

    Raises:
        DataError: names both rows.
    """
    seen: dict[str, int] = {}
    for row in rows:
        sample_id = str(dataset[row][1]["id"])
        if sample_id in seen:
            raise DataError(
                f"rows {seen[sample_id]} and {row} have the same id {sample_id!r}. Each sample "
                "needs its own, because predictions are kept by it: correct the data, or the "
                "dataset part."
            )
        seen[sample_id] = row
