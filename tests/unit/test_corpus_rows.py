"""A corpus as the dataset of a run: its rows, what is held out, how steps draw, what is refused."""

import functools
import itertools
import pickle
import random
import tracemalloc

import numpy
import pytest

from commands.train_data import left_over_rows, mixture_of
from options.data import CorpusRunOptions
from options.fields import OptionError, check_together
from options.parts import chosen_part
from options.train import RunConfig
from register import collate_fn_register, dataset_register, import_shelf
from stageline.corpus.header import CorpusHeader, CutRules, SegmentType, TokenizerInfo
from stageline.corpus.run_sampler import run_sampler
from stageline.data.batches.loader import MicroBatchLoader, example_micro_batch
from stageline.data.batches.plain_text import CorpusRows, held_out_starts
from stageline.errors import DataError, UserError
from tests.helpers.tiny_corpora import documents, tiny_corpus
from tests.helpers.tiny_models import tiny_tokenizer

import_shelf()
# segments of documents, of two types: 3 + 1 + 2 + 1 + 4 and 1 + 2 + 1
LENGTHS = ([(9, 9, 5), (3,), (7, 8), (16,), (4, 5, 6, 7)], [(10,), (12, 3), (6,)])


@pytest.fixture(scope="module")
def types():
    return [documents(lengths, seed=kind) for kind, lengths in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def prefix(types, tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("corpus") / "both", types)


def part(prefix, **options):
    return dataset_register["corpus"](dataset_path=str(prefix), **options)


def tokens(dataset):
    return [
        [segment.tolist() for segment in dataset[row][1]["segments"]] for row in range(len(dataset))
    ]


def flat(types):
    return [[segment] for of_type in types for document in of_type for segment in document]


def test_rows_are_the_segments_and_know_where_they_are(prefix, types):
    dataset = part(prefix)
    assert tokens(dataset) == flat(types)
    assert dataset.sizes == [11, 4] and len(dataset) == 15
    images, sample = dataset[12]
    assert images is None and sample["id"] == "12" and sample["source"] == str(prefix)
    assert dataset.describe(12) == f"{prefix}: segment 12"
    with pytest.raises(IndexError):
        dataset[15]
    assert tokens(pickle.loads(pickle.dumps(dataset))) == flat(types)


@pytest.mark.parametrize(
    ("test_size", "held"),
    [(2, [4, 3]), (5, [5, None]), (0.5, [7, 3])],
    ids=str,
)
def test_held_out_are_whole_documents_at_the_end_of_each_type(prefix, types, test_size, held):
    if None in held:
        with pytest.raises(UserError, match="holds out all 4 segments of type type1"):
            part(prefix, test_size=test_size)
        return
    train, test = (part(prefix, split=split, test_size=test_size) for split in ("train", "test"))
    segments = [flat([of_type]) for of_type in types]
    pairs = list(zip(segments, held, strict=True))
    assert tokens(test) == [row for of_type, count in pairs for row in of_type[-count:]]
    assert tokens(train) == [row for of_type, count in pairs for row in of_type[:-count]]
    assert train.fingerprint() != test.fingerprint() != part(prefix).fingerprint()


def test_the_fingerprint_is_of_the_content(prefix, types, tmp_path):
    same = tiny_corpus(tmp_path / "same", types)
    other = tiny_corpus(tmp_path / "other", [types[0], types[1][::-1]])
    assert part(same).fingerprint() == part(prefix).fingerprint() != part(other).fingerprint()
    held = part(prefix, split="test", test_path=str(other))
    assert tokens(held) == tokens(part(other))


def test_packed_rows_hold_each_segment_once_and_are_made_where_they_are_missing(types, tmp_path):
    prefix = tiny_corpus(tmp_path / "packed", types)
    dataset = part(prefix, rows="packed")
    assert dataset.sizes[0] == 6 and len(dataset) < 15  # 79 tokens of type 0 in rows of 16
    rows = tokens(dataset)
    assert all(sum(map(len, row)) <= 16 for row in rows)
    assert sorted(segment for row in rows for segment in row) == sorted(
        segment for (segment,) in flat(types)
    )
    first_type = {tuple(segment) for (segment,) in flat(types[:1])}
    assert {tuple(segment) for row in rows[:6] for segment in row} == first_type
    assert tokens(dataset.unpacked()) == flat(types)
    assert dataset[0][1]["is_packed"] and dataset.describe(0).endswith("packed row 0")
    with pytest.raises(UserError, match="rows of 16 tokens, not of 32"):
        part(prefix, rows="packed", row_length=32)
    (prefix.parent / "packed.pack").unlink()
    wider = part(prefix, rows="packed", row_length=32)
    assert wider.row_length == part(prefix, rows="packed").row_length == 32
    assert wider.fingerprint() != dataset.fingerprint() != part(prefix).fingerprint()
    with pytest.raises(UserError, match=r"--max-token-num is 16.*--dataset.row_length"):
        check(wider, overlong="cut")
    held = part(prefix, rows="packed", split="test", test_path=str(prefix))
    assert "is_packed" not in held[0][1] and len(held) == 15


def test_packed_rows_are_drawn_and_learnt_as_their_segments(types, tmp_path):
    prefix = tiny_corpus(tmp_path / "packed", types)
    dataset = part(prefix, rows="packed", drop_mode="last_ends_fill")
    steps = iter(loader(dataset, batch_size=2, seed=1))
    seen = set()
    for batch in next(steps) + next(steps):
        (row,) = set(batch["loss_packed_rows"].tolist())
        lengths = [len(segment) for segment in dataset[row][1]["segments"]]
        assert batch["sample_ids"].amax() + 1 == len(lengths) == len(batch["loss_packed_rows"])
        assert (batch["labels"] != -100).sum() == sum(lengths) - len(lengths)
        seen.add(row)
    assert len(seen) == 4


def test_what_has_no_sense_is_refused(prefix):
    with pytest.raises(UserError, match="requires --dataset-path"):
        dataset_register["corpus"](dataset_path=None)
    with pytest.raises(DataError, match="other.idx is missing"):
        part(prefix.parent / "other")
    with pytest.raises(UserError, match="no held-out rows"):
        part(prefix, split="test")
    with pytest.raises(UserError, match="both given"):
        part(prefix, test_size=1, test_path=str(prefix))
    with pytest.raises(UserError, match="Give a number of segments"):
        part(prefix, test_size=0)
    with pytest.raises(UserError, match="rows hold segments of the whole"):
        part(prefix, rows="packed", test_size=1)


def check(dataset, **changes):
    options = {"processor": tiny_tokenizer(), "max_token_num": 16, "vocab_size": 64}
    return dataset.check(**{**options, "overlong": "error", **changes})


def test_a_corpus_is_compared_with_the_run(prefix, types, tmp_path):
    dataset = part(prefix)
    line = check(dataset)
    assert line == f"15 segments of {prefix} (type0: 11, type1: 4), at most 16 tokens"
    with pytest.raises(UserError, match="ids up to 63 .* embedding has 60 rows"):
        check(dataset, vocab_size=60)
    check(dataset, vocab_size=None)
    with pytest.raises(UserError, match="up to 16 tokens, --max-token-num is 15"):
        check(dataset, max_token_num=15)
    check(dataset, max_token_num=15, overlong="cut")
    marked = part(tiny_corpus(tmp_path / "marked", types, fingerprint="abc"))
    marked._fingerprint_of = len
    with pytest.raises(UserError, match="made with the tokenizer tiny, and the one of the run"):
        check(marked)
    marked._fingerprint_of = lambda tokenizer: "abc"
    check(marked)
    check(part(tmp_path / "marked", any_tokenizer=True))


def loader(dataset, **options):
    collate = functools.partial(
        collate_fn_register["pt"],
        **{"prompt": "", "prompt_fn": None, "image_token": None, "processor": None},
        **{"pad_token_id": 0, "max_token_num": 16, "num_stages": 1, "stage": 0},
    )
    return MicroBatchLoader(dataset, collate=collate, micro_batch_size=1, order="given", **options)


def drawn(dataset, num_steps, **options):
    """Return the rows of steps, of all replicas: as texts of their tokens, sorted."""
    steps = [[] for _ in range(num_steps)]
    for rank in range(options["dp_degree"]):
        batches = iter(loader(dataset, dp_rank=rank, **options))
        for rows in steps:
            for batch in next(batches):
                rows.append((batch["loss_rows"].item(), tuple(batch["input_ids"][0].tolist())))
    return [sorted(rows) for rows in steps]


@pytest.mark.parametrize(
    "mixture",
    [{}, {"global_batch_distributed": [3, 1]}, {"mixture_weights": [0.5, 0.5]}],
    ids=str,
)
def test_a_run_goes_on_row_for_row_with_other_replicas_and_accumulation(prefix, mixture):
    dataset = part(prefix, **mixture, drop_mode="last_ends_fill")
    first = {"batch_size": 4, "accumulate_steps": 2, "dp_degree": 1, "seed": 3}
    whole = drawn(dataset, 9, **first)
    assert {row for step in whole for row, _ in step} == set(range(15))
    draw = random.Random(0)
    for _ in range(5):
        step = draw.randrange(1, 8)
        position = loader(dataset, **first).state_after(step)
        dp_degree = draw.choice([1, 2, 4, 8])
        batch_size = draw.choice([size for size in (1, 2, 4, 8) if size * dp_degree <= 8])
        options = {"dp_degree": dp_degree, "batch_size": batch_size, "seed": 3}
        options["accumulate_steps"] = 8 // (dp_degree * batch_size)
        again = drawn(dataset, 9 - step, **options, start_step=step, position=position)
        assert again == whole[step:], (step, options)
        # resumes once more from the state that this run saved
        resumed = loader(dataset, **options, start_step=step, position=position)
        assert resumed.state_after(9) == loader(dataset, **first).state_after(9)


def test_the_state_is_small_and_steps_go_over_the_end_of_an_epoch():
    options = {"batch_size": 3, "step_samples": 6, "dp_degree": 1, "seed": 0}
    sampler = run_sampler([9, 6], **options, counts=[2, 1])
    assert sampler.state_after(0) == {"epoch": 0, "batch": 0, "batch_rows": 3}
    assert sampler.state_after(3) == {"epoch": 1, "batch": 2, "batch_rows": 3}
    steps = [rows for (rows,), _ in zip(sampler.shares(), range(6), strict=False)]
    by_type = [[row >= 9 for row in rows] for rows in steps]
    assert by_type == [[False, False, True] * 2] * 6
    for epoch in range(3):  # 4 batches, 2 steps: type 0 ends with one row left
        rows = [row for step in steps[2 * epoch : 2 * epoch + 2] for row in step]
        assert len(set(rows)) == 12
    huge = run_sampler([10**9, 10**8], **options, counts=[2, 1], start_step=10**7)
    (rows,) = next(huge.shares(10**7))
    assert len(set(rows)) == 6 and max(rows) < 11 * 10**8
    told = sampler.report()
    assert "an epoch is 4 batches of 3 rows (first_ends_drop)" in told
    assert "type 0: 8 of 9 rows, 2 in a batch, 1 left out" in told


class Huge:
    """A corpus of a billion segments, each of which holds its own number."""

    sizes = (9 * 10**8, 10**8)
    type_starts = (0, sizes[0], sum(sizes))

    def __init__(self):
        kinds = tuple(SegmentType(i, str(i), size, size, 1) for i, size in enumerate(self.sizes))
        info = TokenizerInfo("t", "", 64, None, None)
        digests = {"bin_sha256": "", "edges_sha256": "", "arrays_sha256": ""}
        self.header = CorpusHeader("uint16", info, CutRules(16), "", kinds, 0, **digests)

    def __getitem__(self, index):
        return numpy.array([index % 64, index // 64 % 64, index >= self.sizes[0]])

    def flags(self, start, stop):
        return numpy.ones(stop - start, dtype=numpy.uint8)


def test_nothing_walks_a_billion_rows():
    # all that a run does before its first step, and steps late in it; the memory that it takes
    corpus = Huge()
    starts = held_out_starts(corpus, 10)
    assert starts == [9 * 10**8 - 10, 10**9 - 10]
    tracemalloc.start()
    draw = functools.partial(run_sampler, counts=[6, 2])
    ranges = list(zip((0, 9 * 10**8), starts, strict=True))
    dataset = CorpusRows(corpus, ranges, source="h", make_sampler=draw)
    check(dataset)
    assert dataset.fingerprint() and "type 1: " in left_over_rows(RunConfig(batch_size=8), dataset)
    collate = functools.partial(loader(dataset, batch_size=8).step_maker.part)
    example_micro_batch(dataset, collate, 2)
    late = loader(dataset, batch_size=8, start_step=10**7)
    for step in itertools.islice(late, 3):
        kinds = [int(batch["input_ids"][0, 2]) for batch in step]
        assert sorted(kinds) == [0] * 6 + [1] * 2
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_counts_are_of_a_batch_that_steps_consist_of():
    options = {"batch_size": 4, "dp_degree": 2, "seed": 0}
    with pytest.raises(UserError, match=r"5,2 adds up to 7 rows.*global batch has 8.*step 16"):
        run_sampler([9, 9], step_samples=8, counts=[5, 2], **options)
    # a run that began with half the replicas, or half the accumulation, gave these counts
    assert run_sampler([9, 9], step_samples=8, counts=[2, 2], **options).num_batches == 4
    position = {"epoch": 2, "batch": 1, "batch_rows": 8}
    half = run_sampler([9, 9], step_samples=8, counts=[2, 2], **options, position=position)
    assert half.state_after(0) == {"epoch": 2, "batch": 2, "batch_rows": 4}


def test_mixtures_are_options_of_a_corpus_alone():
    run = RunConfig(global_batch_distributed=[2, 2])
    with pytest.raises(UserError, match="--global-batch-distributed does not go with"):
        mixture_of(run, chosen_part("dataset", "jsonl"))
    given = {"global_batch_distributed": [2, 2]}
    assert mixture_of(run, chosen_part("dataset", "corpus")) == given
    assert mixture_of(RunConfig(), chosen_part("dataset", "jsonl")) == {}
    run = CorpusRunOptions(global_batch_distributed=[2, 2], mixture_weights=[0.5, 0.5])
    with pytest.raises(OptionError, match="exclude each other"):
        check_together(run)
