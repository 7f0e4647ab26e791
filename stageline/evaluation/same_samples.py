"""Whether predictions were made for the samples that they are to be scored on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stageline.errors import UserError

# what makes a sample the question that it is; its place in a file or its groups may change
_FIELDS = ("question", "answer", "answers", "caption", "choices", "answer_index", "label")


def check_same_samples(
    records: Mapping[str, dict[str, Any]], samples: Sequence[dict[str, Any]], *, path: str | Path
) -> None:
    """Refuses records whose sample of the same id was another one.

    Raises:
        UserError: names the sample, and what it was.
    """
    for sample in samples:
        kept = records.get(str(sample["id"]), {}).get("sample")
        if not isinstance(kept, dict):
            continue
        for field in _FIELDS:
            if field in kept and field in sample and kept[field] != sample[field]:
                raise UserError(
                    f"{path}: the prediction of sample {str(sample['id'])!r} was made for "
                    f"{field} {_short(kept[field])}, and the dataset has {_short(sample[field])}. "
                    "Predictions of the same data were expected, because others can't be scored "
                    "with it: give another --output-dir (or --compare-with), or the data as it was."
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
