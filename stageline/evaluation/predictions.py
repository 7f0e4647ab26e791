"""Answers the samples of a dataset that predictions.jsonl does not hold yet: asks, and writes down.

The file has one line a sample, appended as answers come, continued after a stop. A line counts for
the same sample and the same settings only; how many devices or which batches made it does not
matter. Of several replicas number 3 writes predictions-3.jsonl beside it. These shards are merged
at the end of a run and, after a run that was killed, at the beginning of the next, whatever the
number of its replicas. Here is also what asking needs: solved samples to stand before a question,
and where replicas of a model meet.
"""

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import Store
from tqdm import tqdm

from stageline.contracts import broken, shown
from stageline.data.batches.batch import Images, render_sample
from stageline.data.batches.step_maker import read_row
from stageline.data.text.rendered import Rendered
from stageline.device import empty_cache
from stageline.errors import DataError, UserError, is_out_of_memory

Result = dict[str, Any] | None
Answers = Sequence[Result] | Iterator[tuple[int, Result]]
Answer = Callable[..., Answers]
# fields of a sample that go into its line: enough to compute any metric from the file
KEPT_TYPES = (str, int, float, bool, list, type(None))
KEPT_NAMES = ("groups",)
SECONDS_BETWEEN_LOOKS = 0.1
# batches whose samples are put in order of length together
BATCHES_OF_A_WINDOW = 32
MOST_AT_ONCE = 512  # pictures of a window may each keep a file open
Key = tuple[Any, str]  # settings and id of a record


def fingerprint(settings: dict[str, Any]) -> str:
    """A short hash of everything that changes an answer."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PredictionFile:
    """Reads what is there, appends what comes.

    Args:
        settings_key: `fingerprint` of the run's settings; lines of others are left alone.

    Attributes:
        records: sample id -> its answer.
        errors: sample id -> why it got none, at some time.
    """

    def __init__(self, path: str | Path, *, settings_key: str) -> None:
        self.path = Path(path)
        self.settings_key = settings_key
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.path.touch()
        # the process was killed while it wrote a last line without its end
        os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        for record in _checked(self.path):
            if record.get("settings") == settings_key:
                self._take(record)

    def append(self, records: list[dict[str, Any]]) -> None:
        """Adds lines; they are on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            for record in records:
                record = {"settings": self.settings_key, **record}
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
                self._take(record)
            file.flush()
            os.fsync(file.fileno())

    def _take(self, record: dict[str, Any]) -> None:
        if "error" in record:
            self.errors[record["id"]] = str(record["error"])
        else:
            self.records[record["id"]] = record


def newest_records(path: Path) -> dict[str, dict[str, Any]]:
    """Sample id -> record, of the settings that the last line was written with.

    Raises:
        DataError: a line is damaged, or nothing is there.
    """
    records = [record for record in _checked(path) if "error" not in record]
    if not records:
        raise DataError(
            f"{path} holds no prediction. Give the predictions.jsonl of a finished evaluation."
        )
    newest = records[-1].get("settings")
    return {record["id"]: record for record in records if record.get("settings") == newest}


def _checked(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in which no run answers a sample twice and differently."""
    seen: dict[Key, tuple[int, str]] = {}
    for number, record, _ in _lines(path):
        if "error" not in record:
            key = record.get("settings"), record["id"]
            first, text = seen.setdefault(key, (number, record["prediction"]))
            if text != record["prediction"]:
                raise DataError(
                    f"{path}:{number}: sample {record['id']!r} has another prediction in line "
                    f"{first}. Two runs may have written into this folder at once. Delete one of "
                    "the lines, or give another `output_dir`."
                )
        yield record


def _lines(
    path: Path, *, leaves_out_torn: bool = False
) -> Iterator[tuple[int, dict[str, Any], str]]:
    """(number, record, line) of each line that is not empty; of a failed sample it has `error`.

    Raises:
        DataError: a line is no record.
    """
    content = path.read_bytes()
    if leaves_out_torn:
        content = content[: content.rfind(b"\n") + 1]
    # not splitlines(): a text may hold line breaks that are no "\n", such as U+2028
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        is_record = isinstance(record, dict) and isinstance(record.get("id"), str)
        if not (is_record and ("error" in record or isinstance(record.get("prediction"), str))):
            raise DataError(
                f"{path}:{number}: {line[:60]!r} is no prediction, an object with id and "
                "prediction. Delete the line, and its sample is answered again."
            )
        yield number, record, line


def shard_path(path: Path, replica: int) -> Path:
    """The shard of one replica."""
    return path.with_name(f"{path.stem}-{replica}{path.suffix}")


def find_shards(path: Path) -> list[Path]:
    """The shards next to a file of predictions, the one that was last written to last."""
    pattern = re.compile(rf"{re.escape(path.stem)}-\d+{re.escape(path.suffix)}")
    found = [one for one in path.parent.iterdir() if pattern.fullmatch(one.name)]
    return sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name))


def merge_shards(path: Path) -> int:
    """Puts the lines of all shards into the file and deletes the shards; returns their number.

    Of several answers to one sample with the same settings the newest counts, and an answer before
    a failure. A last line without its end is left out. Only one process may do this at a time; when
    it is killed, either the old file and the shards are there or the new file.

    Raises:
        DataError: a line in the middle of a file is damaged.
    """
    shards = find_shards(path)
    if not shards:
        return 0
    kept: dict[Key, tuple[bool, str]] = {}  # whether it is an answer, its line
    for source in [*([path] if path.exists() else []), *shards]:
        for _, record, line in _lines(source, leaves_out_torn=True):
            key, is_answer = (record.get("settings"), record["id"]), "error" not in record
            if is_answer or not kept.get(key, (False, ""))[0]:
                kept.pop(key, None)  # the newest lines stand last
                kept[key] = (is_answer, line)
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for _, line in kept.values())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    for shard in shards:
        shard.unlink()
    return len(shards)


@dataclass
class Outcome:
    """What became of the samples that were asked for.

    Attributes:
        pending: ids of samples whose answer comes later, from an offline batch.
        failed: id -> why there is no answer.
    """

    pending: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asking:
    """How samples are put to a model.

    Attributes:
        batch_size: samples of one call; fewer once memory was full.
        length_of: (rendered, images) -> tokens; samples are then sorted, the longest of a window
            first, so that batches are even and full memory shows at once. None: as they come.
        has_own_batches: `answer` gets a window of samples at once, because it batches by itself.
        for_generation: render samples without their answers.
        hands_over: further arguments that `answer` takes: samples, batch_size.
        is_shown: with a progress bar.
    """

    batch_size: int
    length_of: Callable[[Rendered, Images], int] | None = None
    has_own_batches: bool = False
    for_generation: bool = True
    hands_over: frozenset[str] = frozenset()
    is_shown: bool = True


def predict(
    dataset: Any,
    rows: Sequence[int],
    *,
    answer: Answer,
    texts: dict[str, Any],
    processor: Any,
    file: PredictionFile,
    asking: Asking,
) -> Outcome:
    """Answers the given rows in batches and appends them to the file.

    Args:
        answer: (images, prompts) -> for each a dict with `text`, or with `error`, or None while
            it is pending; as a list, or as an iterator of (place, dict) in any order, whose
            answers are written as they come. A model part with its options.
        texts: prompt, prompt_fn and image_token of the run.

    Raises:
        torch.OutOfMemoryError: for one sample alone; larger batches are halved.
    """
    waiting = [row for row in rows if str(dataset[row][1]["id"]) not in file.records]
    bar = tqdm(
        total=len(rows),
        initial=len(rows) - len(waiting),
        unit="sample",
        disable=not asking.is_shown,
    )
    texts = {**texts, "processor": processor, "for_generation": asking.for_generation}
    outcome, done = Outcome(), set[int]()

    def ask(batch: Sequence[int]) -> None:
        """One call of `answer`; each answer is written at once."""
        pairs = [dataset[row] for row in batch]
        prompts = [render_sample(images, sample, **texts) for images, sample in pairs]
        further = {
            "samples": [sample for _, sample in pairs],
            "batch_size": min(asking.batch_size, len(batch)),
        }
        answers = answer(
            images=[images for images, _ in pairs],
            prompts=prompts,
            **{name: further[name] for name in asking.hands_over},
        )
        for found in _as_they_come(answers):
            records = []
            for place, result in found:
                sample = pairs[place][1]
                done.add(batch[place])
                if result is None:
                    outcome.pending.append(str(sample["id"]))
                    continue
                if "error" in result:
                    outcome.failed[str(sample["id"])] = result["error"]
                records.append(_record(sample, prompts[place].text, result))
            file.append(records)
            bar.update(len(found))

    def fits(batch: Sequence[int]) -> bool:
        try:
            ask(batch)
        except RuntimeError as error:
            if len(batch) == 1 or not is_out_of_memory(error):
                raise
        else:
            return True
        # outside of the handler: the error's frames hold the tensors that are to go
        empty_cache()
        return False

    size = asking.batch_size
    window = size * BATCHES_OF_A_WINDOW
    if asking.has_own_batches:
        window = min(window, MOST_AT_ONCE)
    elif asking.length_of is None:
        window = size
    for start in range(0, len(waiting), window):
        left = waiting[start : start + window]
        if asking.length_of is not None:  # the longest first
            lengths = {}
            for row in left:
                images, sample = dataset[row]
                lengths[row] = asking.length_of(render_sample(images, sample, **texts), images)
            left.sort(key=lambda row: -lengths[row])
        size = window if asking.has_own_batches else size
        while left:
            batch = left[:size]
            if fits(batch):
                left = left[len(batch) :]
                continue
            size = len(batch) // 2
            print(f"memory was full with {len(batch)} samples at once: going on with {size}")
            left = [row for row in left if row not in done]
    bar.close()
    return outcome


def _as_they_come(answers: Answers) -> Iterator[list[tuple[int, Result]]]:
    """A list at once, an iterator one by one."""
    if isinstance(answers, Sequence):
        yield list(enumerate(answers))
        return
    for one in answers:
        yield [one]


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
        DataError: names both rows, or the dataset part where a row has no id, or is none.
    """
    seen: dict[str, int] = {}
    for row in rows:
        _, sample = read_row(dataset, row)
        if "id" not in sample:
            raise broken(
                "dataset",
                dataset,
                f"gave for row {row} a sample without 'id' ({shown(sample)})",
                why="One that no other row has was expected, because predictions are kept by it",
                cure="add {'id': str(index)}",
                kind=DataError,
            )
        sample_id = str(sample["id"])
        if sample_id in seen:
            raise DataError(
                f"rows {seen[sample_id]} and {row} have the same id {sample_id!r}. Each sample "
                "needs its own, because predictions are kept by it: correct the data, or the "
                "dataset part."
            )
        seen[sample_id] = row


# what makes a sample the question that it is, whatever its id
_QUESTION = ("question", "messages", "caption", "text", "choices")


@dataclass(frozen=True)
class FewShot:
    """Draws examples, solved samples that stand before a question; a prompt_fn part writes them.

    Args:
        dataset: what they are drawn from.
        count: of each sample.
        per_sample: each sample has a draw of its own, by seed and id; else all have the same, but
            for one that would be its own example.
    """

    dataset: Any
    count: int
    seed: int
    per_sample: bool

    def of(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The examples of one sample, in the order in which they are shown.

        Raises:
            UserError: there are too few, or they have pictures.
        """
        found: list[dict[str, Any]] = []
        seen: set[int] = set()
        own = f"/{sample.get('id')}" if self.per_sample else ""
        draw = random.Random(f"{self.seed}{own}")
        while len(found) < self.count and len(seen) < len(self.dataset):
            row = draw.randrange(len(self.dataset))
            if row in seen:
                continue
            seen.add(row)
            images, example = self.dataset[row]
            if images:
                raise UserError(
                    f"`num_fewshot` {self.count} came with samples that have pictures: a template "
                    "has places for the pictures of one sample only. Leave `num_fewshot` out."
                )
            if not _is_same(example, sample):
                found.append(example)
        if len(found) < self.count:
            raise UserError(
                f"`num_fewshot` {self.count}: only {len(found)} samples can stand before sample "
                f"{sample.get('id')}. Lower it, or choose another `fewshot.split`."
            )
        return found


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if str(one.get("id")) == str(other.get("id")):
        return True
    known = [name for name in _QUESTION if one.get(name) is not None or other.get(name) is not None]
    return bool(known) and all(one.get(name) == other.get(name) for name in known)


@dataclass(frozen=True)
class EvaluationReplicas:
    """Which replica of a model this process belongs to, and where replicas wait for each other.

    They exchange no tensors: each answers its share of the samples. They meet in the store of the
    run, without a time limit, because one may have hours more to do than another; a launcher that
    sees one fail ends the others.

    Attributes:
        index: of its replica.
        count: of replicas.
        is_first: the first process of its replica, which asks and writes; others only compute.
        store: of all processes of the run; None where there is one.
    """

    index: int = 0
    count: int = 1
    is_first: bool = True
    store: Store | None = None

    @property
    def is_main(self) -> bool:
        """The one process that merges, reports and prints."""
        return self.index == 0 and self.is_first

    def share(self, items: Sequence[int]) -> list[int]:
        """This replica's part of what all have to do; every item is in one part."""
        return list(items[self.index :: self.count])

    def tell(self, word: str) -> None:
        """Says that this replica has come so far."""
        if self.store is not None and self.is_first:
            self.store.set(f"stageline/replica/{self.index}/{word}", "1")

    def wait_for_main(self, word: str) -> None:
        """Returns when the main process told this word."""
        self._wait([0], word)

    def wait_for_all(self, word: str) -> None:
        """Returns when all replicas told this word."""
        self._wait(range(self.count), word)

    def _wait(self, replicas: Sequence[int], word: str) -> None:
        names = [f"stageline/replica/{index}/{word}" for index in replicas]
        while self.store is not None and not self.store.check(names):
            time.sleep(SECONDS_BETWEEN_LOOKS)
