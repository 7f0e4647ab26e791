"""Wrong configuration: code 2 with the place and the cure, before any process starts."""

import os
import shutil
import subprocess

import pytest

from commands.run_plan import make_plan
from commands.train import SHELF
from parse_args import parse_train_args
from register import ALL_REGISTERS, import_parts, import_shelf
from stageline.pipeline.schedules import SCHEDULES
from tests.helpers.ready_venv import mark_ready
from tests.helpers.small_run import ROOT, Job

import_shelf(*SHELF)
TRAIN = (
    "--dataset rows --prompt p --prompt-fn fill --image-token none --train-model tiny "
    "--collate-fn pack --loss-fn sft --optimizer adamw --lr-scheduler cosine --tracker none "
    "--engine pipeline"
).split()


def rows(*, dataset_path, split="train", names: list[str] | None = None, table: dict | None = None):
    """Rows."""


@pytest.fixture
def parts():
    for register in ALL_REGISTERS.values():
        register.data = {}
    for option, key in zip(TRAIN[::2], TRAIN[1::2], strict=True):
        name = option[2:].replace("-", "_")
        ALL_REGISTERS[name][key] = "[ANSWER]" if name == "prompt" else lambda *args, **kwargs: None
    ALL_REGISTERS["dataset"].register("rows", rows, replace=True)


def error_of(*words):
    """The message of a command line."""
    with pytest.raises(Exception) as caught:
        parse_train_args([*TRAIN, *map(str, words)])
    assert caught.value.exit_code == 2, caught.value
    return str(caught.value)


def assert_in(message, *wanted):
    assert not [text for text in wanted if text not in message], message


# -- H1, H2: expressions, malformed lists ---------------------------------------------


@pytest.mark.parametrize("option", ["--partition", "--batch-size", "--learning-rate", "--seed"])
@pytest.mark.parametrize("form", ["{}", "[{}]", "[1, {}]", "!!python/object/apply:{}"])
def test_h01_an_expression_is_not_evaluated(parts, tmp_path, option, form):
    canary = tmp_path / "X"
    code = form.format(f"__import__('os').system('touch {canary}')")
    assert_in(error_of(f"{option}={code}"), option, "has a wrong value")
    assert not canary.exists()


def test_h01_an_expression_among_names_stays_text(parts, tmp_path):
    code = f"__import__('os').system('touch {tmp_path / 'X'}')"
    run = parse_train_args([*TRAIN, "--lora.target", code]).run
    assert run.lora.target == [code] and not (tmp_path / "X").exists()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("[1,2", ["has a wrong value", "list[int]"]),
        ("1,2]", ["has a wrong value"]),
        ("[1,[2]]", ["has a wrong value"]),
        ("{1: 2}", ["has a wrong value"]),
        ("1,,2", ["nothing in place 2"]),
        ("1,2,", ["nothing in place 3"]),
        ("1.5,2", ["has a wrong value"]),
        ("1\0,2", ["has a wrong value"]),
        ("[1, !!python/name:os.system ]", ["has a wrong value"]),
    ],
)
def test_h02_a_malformed_list(parts, value, wanted):
    assert_in(error_of(f"--partition={value}"), "--partition", *wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("seed: 1\nbatch-size: 4\nseed: 2\n", ["'seed' comes twice", "line 3"]),
        ("seed: [1\nbatch-size: 4\n", ["is not plain YAML", "line 2"]),
    ],
)
def test_h02_a_malformed_config_file(parts, tmp_path, text, wanted):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert_in(error_of("--config", file), str(file), *wanted)


# -- H3, H4, H6: names, ranges, batches --------------------------------------------------------


def test_h03_unknown_names_get_the_closest(parts):
    assert_in(error_of("--batch-siez", 4), "--batch-siez", "Did you mean --batch-size")
    assert_in(error_of("--dataset", "rowz"), "--dataset", "rowz", "rows")
    assert_in(error_of("--dataset.nmaes", "x"), "mean --dataset.names")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--learning-rate fast", ["--learning-rate fast", "float"]),
        ("--learning-rate nan", ["--learning-rate nan", "float"]),
        ("--learning-rate .nan", ["--learning-rate nan is out of range", "at least 0"]),
        ("--learning-rate -1e-4", ["--learning-rate -0.0001", "at least 0"]),
        ("--max-grad-norm .inf", ["--max-grad-norm inf is out of range"]),
        ("--batch-size 0", ["--batch-size 0", "at least 1"]),
        ("--micro-batch-size -2", ["--micro-batch-size -2", "at least 1"]),
        ("--batch-size true", ["--batch-size true", "int"]),
        ("--seed -1", ["--seed -1", "at least 0"]),
        ("--total-steps 1.5", ["--total-steps 1.5", "int"]),
    ],
)
def test_h04_wrong_types_and_ranges(parts, words, wanted):
    assert_in(error_of(*words.split()), *wanted)


def test_h06_a_batch_that_does_not_fall_into_micro_batches(parts):
    message = error_of("--batch-size", 10, "--micro-batch-size", 4)
    assert_in(message, "--batch-size 10", "--micro-batch-size 4", "8 or 12")


# -- H5, H7, H8: micro-batches, stages and processes -------------------------------------------


def topology_of(*words):
    return make_plan(parse_train_args([*TRAIN, *map(str, words)])).topology


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_h05_fewer_micro_batches_than_stages(parts, monkeypatch, name, count):
    """Refused with both numbers, or one of the numbers that a schedule's own tests run."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ("--schedule", name, "--num-stages", 8)
    words += ("--batch-size", count, "--micro-batch-size", 1)
    try:
        schedule = topology_of(*words).schedule
    except ValueError as error:
        assert error.exit_code == 2
        assert_in(str(error), f"{count} micro-batches", "8 stages", "Set --batch-size to")
    else:
        orders = schedule.orders(count)
        assert sum(map(len, orders)) >= 8 * 2 * count, "each micro-batch goes through every stage"


def test_h08_processes_and_stages_that_do_not_fit(parts, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="3 processes were started, the run has 2") as caught:
        topology_of("--num-stages", 2, "--dp-degree", 1)
    assert caught.value.exit_code == 2
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match="--num-stages 3 can't be spread"):
        topology_of("--num-stages", 3, "--schedule", "zbv")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--num-stages", 5, "--schedule", "looped_bfs", "--stages-per-rank", 5), ["4 layers"]),
        (("--partition", "2,3"), ["--partition 2,3", "sums to 5", "4 layers"]),
        (("--partition", "1,2"), ["--partition 1,2", "sums to 3", "4 layers"]),
    ],
    ids=["few", "overlap", "gap"],
)
def test_h07_layers_that_do_not_fit_the_stages(tmp_path, options, wanted):
    ranks = 1 if "--stages-per-rank" in options else 2
    finished = Job(tmp_path, num_layers=4).fork("run", *options, ranks=ranks)
    assert finished.code == 2
    assert_in(finished.err, *wanted)
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {
        "run.lock",
        "run.log",
        "failures",
    }


@pytest.mark.parametrize(
    ("counts", "wanted"), [("3,0", "a stage without a layer"), ("3,-1", "a stage without a layer")]
)
def test_h07_stages_without_layers(parts, counts, wanted):
    assert_in(error_of(f"--partition={counts}"), wanted)


# -- H9, H10: registers and YAML ---------------------------------------------------------------


def test_h09_a_name_that_is_taken_names_both_places(tmp_path):
    part = tmp_path / "mine_for_h09.py"
    part.write_text(
        '"""A part."""\n\nfrom register import loss_fn_register\n\n\n'
        '@loss_fn_register("sft")\ndef sft(output, batch, *, num_targets):\n    """Mine."""\n'
    )
    with pytest.raises(ValueError) as caught:
        import_parts([str(part)])
    assert caught.value.exit_code == 2
    assert_in(str(caught.value), "sft", "loss_fn.py:", f"{part.name}:")


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {}']",
        "!!python/object/new:os.system ['touch {}']",
        "!!python/object:os.system {{}}",
        "!!python/name:os.system",
        "!!python/module:os",
    ],
)
@pytest.mark.parametrize("place", ["config", "value"])
def test_h10_python_objects_in_yaml(parts, tmp_path, tag, place):
    canary = tmp_path / "X"
    text = tag.format(canary)
    if place == "value":
        assert_in(error_of(f"--partition=[{text}]"), "--partition", "wrong value")
    else:
        file = tmp_path / "run.yaml"
        file.write_text(f"batch-size: 4\nseed: {text}\n")
        assert_in(error_of("--config", file), str(file), "not plain YAML", "line 2")
    assert not canary.exists()


# -- H11: words of a shell in paths ------------------------------------------------------------

NASTY = "a; touch X1 $(touch X2) `touch X3` & | > X4\n#'\""
# stands for the python of a recipe: writes down its words
FAKE = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" >"$WORDS"\n'


@pytest.mark.parametrize(
    "recipe", ["train_pp.sh", "train_smollm2_lora.sh", "evaluate.sh", "export.sh"]
)
def test_h11_recipes_pass_words_on_as_they_are(tmp_path, recipe):
    root = tmp_path / NASTY
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "requirements.lock", root)
    shutil.copy(ROOT / "pyproject.toml", root)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o700)
    mark_ready(root / ".venv", root=root)
    names = ("MODEL_PATH", "OUTPUT_PATH", "CONFIG_PATH", "DATASET_PATH")
    environment = {
        **{name: value for name, value in os.environ.items() if "STAGELINE" not in name},
        **dict.fromkeys(names, NASTY),
        "WORDS": str(tmp_path / "words"),
    }
    done = subprocess.run(
        ["bash", str(root / "scripts" / recipe), "--output-dir", NASTY],
        cwd=root, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().split("\0")
    assert words[0].startswith(f"{root}/") and words[-3:] == ["--output-dir", NASTY, ""]
    made = [name for folder in (tmp_path, root) for name in os.listdir(folder)]
    assert [name for name in made if name.startswith("X")] == []


def test_h11_paths_are_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / NASTY
    folder.mkdir()
    job = Job(folder)
    options = ("--total-steps", 1, "--save-steps", 1, "--lora.target", "q_proj")
    finished = job.fork(NASTY, *options, ranks=1)
    assert finished.code == 0, finished.err
    assert job.checkpoints(NASTY) == ["step-00000001"]
    again = job.fork("again", "--config", folder / NASTY / "config.yaml", ranks=1)
    assert again.code == 0, again.err
    assert sorted(os.listdir(tmp_path)) == [NASTY]
    assert [name for name in os.listdir(folder) if name.startswith("X")] == []
