"""Parts that break their contract, through the entry file: named with file and line, before step 1.

What is found without a model runs in this process, and some of it with --check-only; the rest on
two ranks.
"""

import re
import sys
from pathlib import Path

import pytest

from commands.train import SHELF
from commands.train_data import check_data
from commands.train_parts import check_parts
from parse_args import parse_train_args
from register import import_shelf
from stageline.errors import UserError
from tests.helpers.forked_entry import run_entry
from tests.helpers.small_run import ROOT, Job
from tests.helpers.small_vision_run import VisionJob

import_shelf(*SHELF)
DATA = Path(__file__).with_name("contract_data_parts.py")
RUN = Path(__file__).with_name("contract_run_parts.py")


@pytest.fixture(autouse=True)
def _parts_are_imported_anew():
    """Registers are put back after each test, so the parts have to register again."""
    yield
    for file in (DATA, RUN):
        sys.modules.pop(file.stem, None)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("text"), num_layers=4)


@pytest.fixture(scope="module")
def vision_job(tmp_path_factory):
    return VisionJob(tmp_path_factory.mktemp("vision"))


def run(job, words, *, ranks=1, name="run"):
    """Runs the entry file; in one process with --check-only."""
    options = [*words.split(), "--total-steps", 2, "--save-steps", 0]
    options += ["--import", DATA, "--import", RUN, *(["--check-only"] if ranks == 1 else [])]
    return job.fork(name, *options, ranks=ranks)


def assert_refused(done, code, *words):
    """One error whose first line names a place and all words; nothing was trained."""
    assert done.code == code, done.out + done.err
    lines = [line for line in done.err.splitlines() if line.startswith("error[")]
    assert len(set(lines)) == 1, done.err
    assert "Traceback" not in done.err and "step 1/" not in done.out
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


def line_of(name, file):
    """The line on which a part is written: what its name stands behind, or its decorator."""
    lines = file.read_text().splitlines()
    (index,) = (i for i, line in enumerate(lines) if re.match(rf"(def|class) {name}\b", line))
    return index if lines[index - 1].startswith("@") else index + 1


# -- found without a model -------------------------------------------------------------------


def test_a_run_ends_with_the_code_of_what_is_wrong(job):
    done = run(job, "--dataset row_is_a_dict")
    place = f"OtherRows (tests/scripts/{DATA.name}:"
    came = "gave for row 0 a dict with 'id', 'question', 'answer'"
    assert "return (None, sample)" in assert_refused(done, 3, "error[data]", place, came)
    done = run(job, "--loss-fn loss_mean")
    assert_refused(done, 2, "error[contract]: the loss_fn ", "Half of it was expected")


PARTS = [  # options, kind of part, its name, file, what came; more: unit/test_part_contracts.py
    ("--dataset row_is_swapped", "dataset", "RowIsSwapped", DATA, "as its sample"),
    ("--loss-fn loss_vector", "loss_fn", "loss_vector", RUN, "a tensor of shape ["),
]


@pytest.mark.parametrize(
    ("words", "register", "name", "file", "came"), PARTS, ids=[one[0].split()[1] for one in PARTS]
)
def test_a_part_that_breaks_its_contract(job, words, register, name, file, came):
    imports = ("--import", DATA, "--import", RUN, "--num-stages", 1)
    command = job.command("run", *imports, *words.split())
    arguments = parse_train_args(command[command.index("--train-model") :])
    with pytest.raises(UserError) as caught:
        check_parts(arguments, check_data(arguments))
    told = str(caught.value)
    assert told.startswith(f"the {register} {name} (tests/scripts/{file.name}:"), told
    assert came in told and "Contract: " in told
    assert f"{name} (tests/scripts/{file.name}:{line_of(name, file)})" in told


def test_an_image_token_of_another_model(vision_job):
    done = run(vision_job, "--image-token qwen_vl")
    assert_refused(done, 2, "rows.jsonl:1", "without '<IMG_CONTEXT>'", "InternVLProcessor")


# -- rows that are too long ------------------------------------------------------------------


def test_held_out_rows_that_are_all_too_long(job):
    words = "--dataset long_test_rows --eval-samples 8 --collate-fn.overlong drop"
    assert_refused(run(job, words), 3, "held-out rows", "tokens", "--max-token-num")


def test_held_out_rows_of_which_nothing_is_learnt(job):
    """A loss over nothing would be 0, and so the best."""
    words = "--dataset long_test_rows --eval-samples 8 --collate-fn collate_no_test_targets"
    done = run(job, words + " --max-token-num 128", ranks=2)
    assert_refused(done, 3, "none of the 8 held-out rows has a supervised token")


def test_too_long_rows_are_dropped_before_steps_are_made(job):
    """Four of five rows are too long: steps of 8 would hold too few, or none, to learn from."""
    words = "--dataset some_long_rows --dataset.number 40 --collate-fn.overlong drop"
    done = job.train("dropped", *words.split(), "--import", DATA, "--total-steps", 6, ranks=1)
    assert "32 rows are dropped, 8 are left" in done.out
    assert [record["num_samples"] for record in job.records("dropped")] == [8] * 6
    few = words.replace("40", "35")
    assert_refused(run(job, few), 2, "the dataset has 7 rows")


# -- found when stages are there -------------------------------------------------------------


def test_a_stage_that_breaks_its_contract(job):
    done = run(job, "--train-model stage_wrong_shape", ranks=2)
    place = f"the stage model WrongShape (tests/scripts/{RUN.name}:{line_of('WrongShape', RUN)})"
    came = "stage 1 expects [((2, 15, 8), torch.float32)]"
    assert_refused(done, 2, "error[contract] rank=0 stage=0", place, came, "Contract: ")


def test_a_buffer_that_was_made_under_meta(job):
    done = run(job, "--train-model stage_lost_buffer", ranks=2)
    place = f"LostBuffer (tests/scripts/{RUN.name}:{line_of('LostBuffer', RUN)})"
    assert_refused(done, 2, place, "no value", "table", "reset_parameters()")


def test_an_optimizer_that_would_train_less(job):
    done = run(job, "--optimizer optimizer_of_one", ranks=2)
    assert_refused(done, 2, "error[contract] rank=", "the optimizer ", "leaves out ")


def test_a_mistake_inside_a_part_stays_a_crash_with_its_traceback(job):
    done = run(job, "--prompt-fn raises_key_error")
    assert done.code == 9 and "KeyError: 'title' at contract_data_parts.py:" in done.err


@pytest.mark.parametrize(
    ("words", "code", "came"),
    [
        ("--metric metric_number", 2, "the metric metric_number (tests/scripts/"),
        ("--dataset has_no_id", 3, "gave for row 0 a sample without 'id'"),
    ],
)
def test_an_evaluation_refuses_before_it_answers(job, words, code, came):
    options = "--builder auto --model generate --dataset rows --prompt question --prompt-fn fill "
    options += "--image-token none --metric exact_match --check-only --device cpu"
    paths = ("--model-path", job.model, "--output-dir", job.folder / "evaluation")
    done = run_entry(
        [ROOT / "evaluate.py", "--import", DATA, *options.split(), *paths, *words.split()]
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert done.returncode == code and came in told[0] and "Contract: " in told[0], done.stderr
