"""Answer the samples of a dataset that predictions.jsonl does not hold yet, and write them there.

The file has one line a sample, appended as answers come, continued after a stop. A line counts for
the same sample and the same settings only; the number of devices and the batches do not matter.
With several replicas, number 3 writes predictions-3.jsonl next to it. These shards are merged at
the end of a run or, after a run that was killed, at the beginning of the next, whatever the number
of its replicas. This module also draws few-shot examples and synchronizes the replicas of a model.
"""

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from stageline.run_records import cut_torn_line

Result = dict[str, Any] | None
Answers = Sequence[Result] | Iterator[tuple[int, Result]]
Answer = Callable[..., Answers]
# fields of a sample that go into its line: enough to compute any metric from the file
KEPT_TYPES = (str, int, float, bool, list, type(None))
KEPT_NAMES = ("groups",)
BATCHES_OF_A_WINDOW = 32  # batches whose samples are put in order of length together
MOST_AT_ONCE = 512  # pictures of a window may each keep a file open
Key = tuple[Any, str]  # settings and id of a record


def fingerprint(settings: dict[str, Any]) -> str:
    """Return a short hash of everything that changes an answer."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PredictionFile:
    """The predictions of one run in a file, which may hold other runs.

    Args:
        settings_key: `fingerprint` of the run's settings.

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
        cut_torn_line(self.path)
        for record in _checked(self.path):
            if record.get("settings") == settings_key:
                self._take(record)

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add lines; they are on the disk when this returns."""
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
    """Return sample id -> record, of the settings that the last line was written with."""
    records = [record for record in _checked(path) if "error" not in record]
    if not records:
        raise DataError(
            f"{path} holds no prediction. Give the predictions.jsonl of a finished evaluation."
        )
    newest = records[-1].get("settings")
    return {record["id"]: record for record in records if record.get("settings") == newest}


def _checked(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, in which no run answers a sample twice and differently."""
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


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yield (number, record, line) of each line; the record of a failed sample has `error`."""
    # not splitlines(): a text may hold line breaks that are no "\n", such as U+2028
    for number, line in enumerate(path.read_bytes().decode("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        is_record = isinstance(record, dict) and isinstance(record.get("id"), str)
        if not (is_record and ("error" in record or isinstance(record.get("prediction"), str))):
            raise DataError(
                f"{path}:{number}: {line[:60]!r} is not a prediction, an object with id and "
                "prediction. Delete the line, and its sample is answered again."
            )
        yield number, record, line


def shard_path(path: Path, replica: int) -> Path:
    """Return the shard of one replica."""
    return path.with_name(f"{path.stem}-{replica}{path.suffix}")


def find_shards(path: Path) -> list[Path]:
    """Return the shards next to a file of predictions, the one that was last written to last."""
    found = path.parent.glob(f"{path.stem}-[0-9]*{path.suffix}")
    return sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name))


def merge_shards(path: Path) -> int:
    """Put the lines of all shards into the file, delete the shards, and return their number.

    The newest of several answers to one sample with the same settings counts, and an answer before
    a failure. One process may do this at a time; when it is killed, either the old file and the
    shards are there or the new file.
    """
    shards = find_shards(path)
    if not shards:
        return 0
    kept: dict[Key, tuple[bool, str]] = {}  # whether it is an answer, its line
    for source in [*([path] if path.exists() else []), *shards]:
        cut_torn_line(source)
        for _, record, line in _lines(source):
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
    """Samples of a run without an answer.

    Attributes:
        pending: ids of samples whose answer comes later, from an offline batch.
        failed: id -> reason why there is no answer.
    """

    pending: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asking:
    """Settings for asking a model.

    Attributes:
        batch_size: samples of one call; fewer once memory was full.
        length_of: (rendered, images) -> tokens; the longest of a window then come first, so that
            batches are even and full memory shows at once. None keeps the order of the samples.
        has_own_batches: `answer` gets a window of samples at once, because it batches by itself.
        for_generation: render samples without their answers.
        hands_over: further arguments that `answer` takes: samples, batch_size.
        is_shown: show a progress bar.
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
    """Answer the given rows in batches and append them to the file.

    A batch for which memory is too small is halved.

    Args:
        answer: (images, prompts) -> for each a dict with `text`, or with `error`, or None while
            it is pending; as a list, or as an iterator of (place, dict) in any order, whose
            answers are written as they come. A model part with its options.
        texts: prompt, prompt_fn and image_token of the run.
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
        """Call `answer` once, and write each answer at once."""
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
        batches: Iterable[list[tuple[int, Result]]]
        if isinstance(answers, Sequence):
            batches = [list(enumerate(answers))]
        else:  # an iterator yields answers as they come
            batches = ([one] for one in answers)
        for found in batches:
            records = []
            for place, result in found:
                sample = pairs[place][1]
                done.add(batch[place])
                if result is None:
                    outcome.pending.append(str(sample["id"]))
                    continue
                if "error" in result:
                    outcome.failed[str(sample["id"])] = result["error"]
                others = {name: value for name, value in result.items() if name != "text"}
                kept = {
                    name: value
                    for name, value in sample.items()
                    if isinstance(value, KEPT_TYPES) or name in KEPT_NAMES
                }
                record = {"id": str(sample["id"]), "prediction": result.get("text")}
                record |= {"prompt": prompts[place].text, **others, "sample": kept}
                records.append(record)
            file.append(records)
            bar.update(len(found))

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
            try:
                ask(batch)
                left = left[len(batch) :]
                continue
            except RuntimeError as error:
                if len(batch) == 1 or not is_out_of_memory(error):
                    raise
            empty_cache()  # outside of the handler, whose error holds tensors that must be freed
            size = len(batch) // 2
            print(f"memory was full with {len(batch)} samples at once; continuing with {size}")
            left = [row for row in left if row not in done]
    bar.close()
    return outcome


def check_ids(dataset: Any, rows: Sequence[int]) -> None:
    """Refuse samples without an id, or that share one: the file could not tell them apart."""
    seen: dict[str, int] = {}
    for row in rows:
        _, sample = read_row(dataset, row)
        if "id" not in sample:
            raise broken(
                "dataset",
                dataset,
                f"gave for row {row} a sample without 'id' ({shown(sample)})",
                why="Predictions are stored by id, so each row needs its own",
                cure="add {'id': str(index)}",
                kind=DataError,
            )
        sample_id = str(sample["id"])
        if sample_id in seen:
            raise DataError(
                f"rows {seen[sample_id]} and {row} have the same id {sample_id!r}. Give each row "
                "its own."
            )
        seen[sample_id] = row


# fields that decide whether two samples are the same question, whatever their ids
_QUESTION = ("question", "messages", "caption", "text", "choices")


@dataclass(frozen=True)
class FewShot:
    """Draws examples: solved samples before a question, which a prompt_fn part writes.

    Args:
        dataset: the dataset that examples are drawn from.
        count: examples of each sample.
        per_sample: each sample has a draw of its own, by seed and id; else all have the same.
    """

    dataset: Any
    count: int
    seed: int
    per_sample: bool

    def of(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the examples of one sample, which is none of them.

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
                    f"`num_fewshot` {self.count} requires samples without pictures: a template "
                    "has places for those of one sample. Leave `num_fewshot` out."
                )
            is_same = str(example.get("id")) == str(sample.get("id"))
            pairs = [(example.get(name), sample.get(name)) for name in _QUESTION]
            known = [(one, other) for one, other in pairs if (one, other) != (None, None)]
            if not is_same and not (known and all(one == other for one, other in known)):
                found.append(example)
        if len(found) < self.count:
            raise UserError(
                f"`num_fewshot` {self.count}: only {len(found)} samples can stand before sample "
                f"{sample.get('id')}. Lower it, or choose another `fewshot.split`."
            )
        return found


@dataclass(frozen=True)
class EvaluationReplicas:
    """The replica of a model that this process belongs to, and where replicas wait.

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
        """Return this replica's part of the work; every item is in one part."""
        return list(items[self.index :: self.count])

    def tell(self, word: str) -> None:
        """Announce that this replica has come so far."""
        if self.store is not None and self.is_first:
            self.store.set(f"stageline/replica/{self.index}/{word}", "1")

    def wait_for(self, replicas: Iterable[int], word: str) -> None:
        """Return when these replicas have told this word."""
        names = [f"stageline/replica/{index}/{word}" for index in replicas]
        while self.store is not None and not self.store.check(names):
            time.sleep(0.1)
