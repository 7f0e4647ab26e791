"""Groups of samples from JSON-lines files: a line holds anchor, positive and negatives."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stageline.data.bad_rows import current_bad_rows
from stageline.data.contrastive import ROLES
from stageline.data.json_lines import JsonLines
from stageline.data.readers import Row, read_rows
from stageline.errors import DataError, UserError

_MEMBERS = ("anchor", "positive", "negatives")


class Groups(JsonLines):
    """Your own groups: a line is {"anchor": {...}, "positive": {...}, "negatives": [{...}, ...]}.

    Each member is a row as jsonl takes it (question, answer, image ...); fields beside the three
    are shared by all members. A group is rows in the order anchor, positive, negatives.

    Args:
        num_negatives: take the first so many of each group; by default all, which must be the same
            number in each group.
        fields: other names of fields, {"question": "prompt", "answer": "completion"}.
        image_path: folder that image names are relative to; by default that of the file.
        test_size: held-out groups of a single file, as a number, or below 1 as a share; 1.0: all.
        test_path: file of the held-out groups; all of dataset_path is trained then.
        group: field that names the group of a row in reports.
    """

    kind = "groups"

    def __init__(
        self,
        *,
        dataset_path: str | None,
        split: str = "train",
        num_negatives: int | None = None,
        fields: dict[str, str] | None = None,
        image_path: str | None = None,
        test_size: int | float = 0.1,
        test_path: str | None = None,
        group: str = "group",
    ) -> None:
        if num_negatives is not None and num_negatives < 1:
            raise UserError(
                f"--dataset.num_negatives {num_negatives}: at least 1 was expected, because an "
                "anchor's positive is compared with negatives."
            )
        self._num_negatives = num_negatives
        self._first = ""  # the group that says how many there are, where no option does
        super().__init__(
            dataset_path=dataset_path,
            split=split,
            fields=fields,
            image_path=image_path,
            test_size=test_size,
            test_path=test_path,
            group=group,
        )
        self.rows = _whole(self.rows, self.group_size)

    @property
    def group_size(self) -> int:
        """Rows of a group."""
        assert self._num_negatives is not None, "known once the file is read"
        return 2 + self._num_negatives

    def read(self, file: Path) -> list[Row]:
        """The groups of a file; their number of negatives is that of the first good one."""
        good = []
        for row in read_rows(file):
            try:
                self._check(row)
            except DataError as error:
                current_bad_rows().take(row.source, error)
                continue
            good.append(row)
        return good

    def samples(self, rows: Sequence[Row]) -> list[Row]:
        """A row for each member of each group."""
        return [member for row in rows for member in self._members(row)]

    def convert(self, row: Row) -> tuple[list[str] | None, dict[str, Any]]:
        place = f"{row.source} ({row.data['member']})"
        images, sample = super().convert(replace(row, source=place))
        del sample["member"]
        return images, sample

    def _members(self, row: Row) -> Iterable[Row]:
        shared = {name: value for name, value in row.data.items() if name not in _MEMBERS}
        group = str(shared.pop("id", f"{self._name}-{row.number}"))
        negatives = row.data["negatives"][: self._num_negatives]
        for place, own in enumerate([row.data["anchor"], row.data["positive"], *negatives]):
            role = ROLES[min(place, 2)]
            member = role if place < 2 else f"{role} {place - 1}"
            facts = {"contrast_group": group, "role": role, "member": member}
            name = own.get("id", f"{group}-{member.replace(' ', '-')}")
            yield replace(row, data={**shared, **own, **facts, "id": name})

    def _check(self, row: Row) -> None:
        for name in ("anchor", "positive"):
            if not isinstance(row.data.get(name), dict):
                raise _wrong(row, name, "an object with question, answer, image ...")
        negatives = row.data.get("negatives")
        if not isinstance(negatives, list) or not negatives:
            raise _wrong(row, "negatives", "a list of at least one object")
        if not all(isinstance(negative, dict) for negative in negatives):
            raise _wrong(row, "negatives", "a list of objects")
        self._check_number(row, len(negatives))

    def _check_number(self, row: Row, count: int) -> None:
        if self._num_negatives is None:
            self._num_negatives, self._first = count, row.source
        wanted = self._num_negatives
        if count == wanted or (count > wanted and not self._first):
            return
        why = f"as in {self._first}" if self._first else f"as --dataset.num_negatives {wanted} says"
        raise DataError(
            f"{row.source}: the group has {count} negatives, {wanted} were expected, {why}: all "
            "groups must have the same number, because batches hold whole groups. Correct the "
            "row, or take the first few of each with --dataset.num_negatives."
        )


def _whole(rows: Sequence[Row], size: int) -> list[Row]:
    """Without the rest of groups of which a member was bad; neighbours have the same source."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.source] = counts.get(row.source, 0) + 1
    whole = [row for row in rows if counts[row.source] == size]
    if not whole:
        raise DataError(
            f"no whole group is left of {len(counts)}, because each has a bad member. At least one "
            f"was expected:\n{current_bad_rows().listed(5)}"
        )
    return whole


def _wrong(row: Row, field: str, expected: str) -> DataError:
    value = row.data.get(field)
    what = "is missing" if value is None else f"is {repr(value)[:60]}"
    return DataError(
        f"{row.source}: {field!r} {what}. {expected.capitalize()} was expected, because a line is "
        "one group of anchor, positive and negatives; the line has the fields "
        f"{', '.join(sorted(row.data)) or 'none'}. Correct the row."
    )
