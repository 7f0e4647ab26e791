"""Parts that break their contract, through the entry file: named with file and line, before step 1.

What is found without a model runs with --check-only in one process; the rest on two ranks.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import train_pp  # noqa: F401, registers the engines
from options.part_options import ChosenPart
from parse_args import parse_train_args
from register import (
    collate_fn_register,
    import_shelf,
    loss_fn_register,
    lr_scheduler_register,
    optimizer_register,
    sim_fn_register,
)
from stageline.contracts import CONTRACTS
from stageline.errors import ContractError, UserError
from stageline.pipeline.stage_contract import run_stage
from stageline.testing.small_run import ROOT, ForkedRun, Job
from stageline.testing.small_vision_run import VisionJob
from stageline.testing.tiny_datasets import group_row, write_lines
from stageline.training.part_checks import check_sim_fn
from train_data import check_data
from train_parts import (
    SHELF,
    build_part,
    check_parts,
    make_learning_rate,
    make_optimizer,
    make_tracker,
)

import_shelf(*SHELF)
DATA = Path(__file__).with_name("contract_data_parts.py")
RUN = Path(__file__).with_name("contract_run_parts.py")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def vision_job(tmp_path_factory):
    return VisionJob(tmp_path_factory.mktemp("vision"))


@pytest.fixture(autouse=True)
def _parts_are_imported_anew():
    """Registers are put back after each test, so the parts have to register again."""
    yield
    for file in (DATA, RUN):
        sys.modules.pop(file.stem, None)


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

ROWS = [  # key, class, what came
    ("row_is_a_dict", "RowIsADict", "gave for row 0 a dict with 'id', 'question', 'answer'"),
    ("row_is_swapped", "RowIsSwapped", "the sample before the images"),
    ("row_has_text_for_images", "RowHasTextForImages", "a str: '0.png' as its images"),
    ("row_has_one_image", "RowHasOneImage", "one image (Image) in the place of a list"),
    ("row_has_tensor_images", "RowHasTensorImages", "a tensor of shape [3, 24, 24]"),
]


@pytest.mark.parametrize(("key", "name", "came"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_that_is_no_pair(job, key, name, came):
    place = f"the dataset {name} (tests/scripts/{DATA.name}:"
    told = assert_refused(run(job, f"--dataset {key}"), 3, "error[data]", place, came)
    assert "it[i] -> (images or None, sample)" in told


PARTS = [  # options, kind of part, its name, file, what came
    ("--dataset takes_no_split", "dataset", "TakesNoSplit", DATA, "argument 'split'"),
    ("--dataset makes_none", "dataset", "makes_none", DATA, "returned None"),
    ("--dataset has_no_len", "dataset", "HasNoLen", DATA, "has no __len__"),
    ("--prompt-fn gives_a_str", "prompt_fn", "gives_a_str", DATA, "returned a str: '0? !'"),
    ("--prompt-fn takes_one", "prompt_fn", "takes_one", DATA, "signature (sample)"),
    ("--image-token image_token_str", "image_token", "image_token_str", DATA, "a str"),
    ("--collate-fn collate_list", "collate_fn", "collate_list", DATA, "a list of 3 (Tensor, "),
    ("--collate-fn collate_no_labels", "collate_fn", "collate_no_labels", DATA, "without labels"),
    ("--collate-fn collate_flat", "collate_fn", "collate_flat", DATA, "'input_ids' as a tensor"),
    ("--collate-fn collate_one", "collate_fn", "collate_one", DATA, "signature (samples)"),
    ("--loss-fn loss_of_outputs", "loss_fn", "loss_of_outputs", RUN, "num_items_in_batch"),
    ("--loss-fn loss_vector", "loss_fn", "loss_vector", RUN, "a tensor of shape ["),
    ("--loss-fn loss_none", "loss_fn", "loss_none", RUN, "returned None"),
    ("--loss-fn loss_mean", "loss_fn", "loss_mean", RUN, "Half of it was expected"),
    ("--loss-fn loss_detached", "loss_fn", "loss_detached", RUN, "without a graph"),
    ("--optimizer optimizer_lr", "optimizer", "optimizer_lr", RUN, "signature (params, lr)"),
    ("--lr-scheduler rate_none", "lr_scheduler", "<lambda>", RUN, "the rate of step 0"),
]


@pytest.mark.parametrize(
    ("words", "register", "name", "file", "came"), PARTS, ids=[one[0].split()[1] for one in PARTS]
)
def test_a_part_that_breaks_its_contract(job, words, register, name, file, came):
    told = assert_refused(run(job, words), 2, f"error[contract]: the {register} ", came)
    assert f"(tests/scripts/{file.name}:" in told and "Contract: " in told
    if name != "<lambda>":
        assert f"{name} (tests/scripts/{file.name}:{line_of(name, file)})" in told


def test_a_dataset_that_fails_without_a_path(job):
    words = job.command("run", "--num-stages", 1, "--import", DATA, "--dataset", "needs_a_path")[1:]
    place = words.index("--dataset-path")
    done = ForkedRun([*words[:place], *words[place + 2 :], "--check-only"], ranks=1).wait()
    place = f"NeedsAPath (tests/scripts/{DATA.name}:"
    assert_refused(done, 2, "error[contract]", place, "failed without --dataset-path")


@pytest.mark.parametrize("key", ["none", "qwen_vl"])
def test_an_image_token_of_another_model(vision_job, key):
    done = run(vision_job, f"--image-token {key}")
    assert_refused(done, 2, "rows.jsonl:1", "'<IMG_CONTEXT>' was expected", "InternVLProcessor")


# -- rows that are too long ------------------------------------------------------------------


@pytest.mark.parametrize("overlong", ["error", "drop"])
def test_held_out_rows_that_are_all_too_long(job, overlong):
    words = f"--dataset long_test_rows --eval-samples 8 --collate-fn.overlong {overlong}"
    assert_refused(run(job, words), 3, "held-out rows", "tokens", "--max-token-num")


def test_too_long_rows_are_dropped_before_steps_are_made(job):
    """Four of five rows are too long: steps of 8 would hold too few, or none, to learn from."""
    words = "--dataset some_long_rows --dataset.number 40 --collate-fn.overlong drop"
    done = job.fork("dropped", *words.split(), "--import", DATA, "--total-steps", 6, ranks=1)
    assert done.code == 0, done.err
    assert "32 rows are dropped, 8 are left" in done.out
    lines = (job.folder / "dropped" / "log.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    assert [record["num_samples"] for record in records] == [8] * 6
    few = words.replace("40", "35")
    assert_refused(run(job, few), 2, "the dataset has 7 rows")


# -- found when stages are there -------------------------------------------------------------

STAGES = [  # key, stage model, rank, words
    ("stage_dict", "DictStage", 0, "of stage 0 returned a dict with 'hidden_states'"),
    ("stage_last_dict", "LastDictStage", 1, "of stage 1 returned a dict with 'logits'"),
    ("stage_wrong_shape", "WrongShape", 0, "stage 1 expects [((2, 15, 8), torch.float32)]"),
    ("stage_wrong_dtype", "WrongDtype", 0, "stage 1 expects [((2, 15, 16), torch.float64)]"),
    ("stage_wrong_count", "WrongCount", 0, "The same number was expected"),
    ("stage_lost_tensor", "LostTensor", None, "has 1 tensors without values: bias_table"),
    ("stage_last_token", "LastToken", 1, "a tensor of shape [2, 1, "),
]


@pytest.mark.parametrize(("key", "name", "rank", "came"), STAGES, ids=[one[0] for one in STAGES])
def test_a_stage_that_breaks_its_contract(job, key, name, rank, came):
    done = run(job, f"--train-model {key}", ranks=2)
    place = f"the stage model {name} (tests/scripts/{RUN.name}:{line_of(name, RUN)})"
    told = assert_refused(done, 2, "error[contract] rank=", place, came, "Contract: ")
    if rank is not None:  # else each of them has it
        assert f"rank={rank} stage={rank}" in told


@pytest.mark.parametrize("kind", ["", "1"], ids=["integers", "floats"])
def test_a_buffer_that_was_made_under_meta(job, monkeypatch, kind):
    monkeypatch.setenv("FLOATS", kind)
    done = run(job, "--train-model stage_lost_buffer", ranks=2)
    place = f"LostBuffer (tests/scripts/{RUN.name}:{line_of('LostBuffer', RUN)})"
    assert_refused(done, 2, place, "no value", "table", "torch.device('meta')")


def test_a_stage_without_get_example_input(job):
    """That of the base class says another width."""
    words = job.command("run", "--num-stages", 2, "--import", RUN, "--train-model")[1:]
    words[words.index("--model-path")] = "--config-path"
    done = ForkedRun([*words, "stage_no_example"], ranks=2).wait()
    wanted = ("OwnStage (", "made [((2, ", "8), torch.float32)]", "get_example_input")
    assert_refused(done, 2, "error[contract] rank=0 stage=0", *wanted)


@pytest.mark.parametrize(
    ("words", "came"),
    [
        ("--optimizer optimizer_none", "optimizer_none (tests/scripts/contract_run_parts.py:"),
        ("--optimizer optimizer_of_one", "leaves out "),
    ],
)
def test_an_optimizer_that_would_train_less(job, words, came):
    assert_refused(run(job, words, ranks=2), 2, "error[contract] rank=", "the optimizer ", came)


def test_two_ranks_name_the_one_that_failed(job):
    told = assert_refused(run(job, "--loss-fn loss_mean", ranks=2), 2, "error[contract] rank=")
    assert re.match(r"error\[contract\] rank=[01]: the loss_fn loss_mean \(", told)


# -- what ships ------------------------------------------------------------------------------

LOSSES = {  # key -> the collate part that it goes with
    "sft": "sft",
    "pt": "pt",
    "contrastive": "contrastive",
    "dpo": "dpo",
    "kto": "kto",
    "rm": "rm",
}
PAIR_KINDS = "sigmoid robust hinge ipo apo_zero apo_down sppo_hard nca_pair simpo orpo".split()
OPTIONS = {
    "dpo": [f"--loss-fn.loss_type {kind} --loss-fn.sft_weight 0.5" for kind in PAIR_KINDS],
    "kto": ["", "--loss-fn.use_kl false"],
    "rm": ["", "--loss-fn.center_coefficient 0.1"],
    "contrastive": ["--sim-fn js", "--sim-fn cos --loss-fn.temperature 0.5"],
    "sft": ["", "--logits-chunk 4"],
}


def write_rows(job):
    """A file of rows for each collate part."""
    pairs = [
        {"question": f"{i}?", "chosen": "!" * (1 + i % 5), "rejected": "no " * (1 + i % 3)}
        for i in range(24)
    ]
    write_lines(job.folder / "dpo.jsonl", pairs)
    write_lines(job.folder / "rm.jsonl", [row | {"margin": 0.5} for row in pairs])
    kto = [
        {"question": f"{i}?", "answer": "!" * (1 + i % 5), "label": i % 3 > 0} for i in range(24)
    ]
    write_lines(job.folder / "kto.jsonl", kto)
    write_lines(job.folder / "pt.jsonl", [{"text": f"{i} is a number"} for i in range(24)])
    write_lines(job.folder / "contrastive.jsonl", [group_row(i) for i in range(12)])


def shipped(job, *words):
    """The arguments of a training run, and its data, in this process."""
    command = job.command("run", "--num-stages", 2, *words)
    arguments = parse_train_args(command[command.index("--train-model") :])
    return arguments, check_data(arguments)


@pytest.mark.parametrize("key", LOSSES)
def test_shipped_losses_and_collate_parts_pass(job, key):
    assert set(LOSSES) == set(loss_fn_register), "a loss without a test"
    assert set(LOSSES.values()) == set(collate_fn_register), "a collate part without a test"
    write_rows(job)
    collate = LOSSES[key]
    file = job.folder / f"{collate}.jsonl"
    words = ["--loss-fn", key, "--collate-fn", collate]
    if file.exists():
        words += ["--dataset-path", file]
    if key == "contrastive":
        words += ["--dataset", "groups", "--batch-size", 8, "--micro-batch-size", 4]
    if key == "pt":
        words += ["--prompt", "text"]
    if key == "rm":
        words += ["--train-model", "reward"]
    for options in OPTIONS.get(key, [""]):
        check_parts(*shipped(job, *words, *options.split()))


def test_shipped_optimizers_schedules_and_similarities_pass(job):
    arguments, data = shipped(job, "--total-steps", 5)
    parameters = {
        "layers.0.weight": torch.nn.Parameter(torch.randn(4, 4)),
        "norm.weight": torch.nn.Parameter(torch.ones(4)),
    }
    for key, part in optimizer_register.items():
        if key != "adamw_8bit":  # of a package that not everybody has
            arguments.parts["optimizer"] = ChosenPart("optimizer", key, part)
            make_optimizer(arguments, parameters)
    for key, part in lr_scheduler_register.items():
        arguments.parts["lr_scheduler"] = ChosenPart("lr_scheduler", key, part)
        make_learning_rate(arguments)
    for part in sim_fn_register.values():
        check_sim_fn(part)


# -- other ways, in this process -------------------------------------------------------------

OTHERS = [  # options, words of the error
    ("--dataset row_is_none", "gave for row 0 None"),
    ("--dataset row_is_three", "a tuple of 3 (NoneType, dict, int)"),
    ("--dataset row_is_a_dict_of_two", "a dict with 'question', 'answer'"),
    ("--dataset sample_is_a_text", "a str: '0? !' as its sample"),
    ("--dataset row_has_paths_for_images", "a str: '0.png' as image 0"),
    ("--dataset row_has_a_tensor", "a tensor of shape [3, 24, 24] in float32 as its images"),
    ("--dataset takes_no_path", "argument 'dataset_path'"),
    ("--dataset has_no_getitem", "has no __getitem__"),
    ("--prompt-fn gives_none", "returned None"),
    ("--prompt-fn gives_pieces", "a list of 5 (Piece, "),
    ("--image-token image_token_one", "signature (rendered)"),
    ("--collate-fn collate_none", "returned None"),
    ("--collate-fn collate_lists", "'input_ids' as a list of 2"),
    ("--collate-fn collate_no_mask", "without attention_mask"),
    ("--collate-fn collate_float_ids", "in float32"),
    ("--collate-fn collate_short_labels", "'labels' as a tensor of shape [2, 14]"),
    ("--collate-fn collate_fewer_rows", "made 1 rows of 15 tokens out of 2 samples"),
    ("--loss-fn loss_of_two", "signature (logits, labels)"),
    ("--loss-fn loss_half_mean", "Half of it was expected"),
    ("--loss-fn loss_mean_over_count", "two halves of them added up"),
    ("--loss-fn loss_float", "returned a float"),
    ("--loss-fn loss_one_element", "a tensor of shape [1]"),
    ("--loss-fn loss_integer", "in int64"),
    ("--loss-fn loss_dict", "a dict with 'loss'"),
    ("--loss-fn loss_three", "a tuple of 3"),
    ("--loss-fn loss_figure_float", "the figure 'mine': a float: 1.0"),
    ("--loss-fn loss_figure_mean", "the figure 'entropy'"),
    ("--loss-fn loss_false_sum", "says is_token_sum"),
    ("--loss-fn loss_bad_count", "the count 'num_mine'"),
    ("--lr-scheduler rate_is_a_number", "returned a float"),
    ("--lr-scheduler rate_is_an_object", "returned a LambdaLR"),
]


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # what loss_float does
@pytest.mark.parametrize(("words", "came"), OTHERS, ids=[one[0].split()[1] for one in OTHERS])
def test_other_ways_to_break_a_contract(job, words, came):
    with pytest.raises(UserError) as caught:
        check_parts(*shipped(job, "--import", DATA, "--import", RUN, *words.split()))
    message = str(caught.value)
    assert came in message and "Contract: " in message
    assert re.search(r" \(tests/scripts/contract_\w+_parts\.py:\d+\)", message), message


@pytest.mark.parametrize(
    ("words", "came"),
    [
        ("stage_plain", "has no get_example_input"),
        ("stage_alone", "returned a model alone"),
        ("stage_example_tensor", "said of the input of stage 0: a tensor"),
        ("stage_example_none", "said of the input of stage 0: None"),
    ],
)
def test_what_a_train_model_part_returned(job, words, came):
    arguments, _ = shipped(job, "--import", RUN, "--train-model", words)
    with pytest.raises(ContractError, match=came):
        build_part(arguments, stage=0, num_stages=2, device="cpu", partition=None)


def test_a_stage_that_takes_the_hidden_states_alone(job):
    arguments, _ = shipped(job, "--import", RUN, "--train-model", "stage_takes_one")
    model = build_part(arguments, stage=0, num_stages=2, device="cpu", partition=None)
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ContractError, match=r"forward\(self, hidden_or_ids, \*extras, \*\*batch"):
        run_stage(model, (ids,), {"input_ids": ids})


@pytest.mark.parametrize(
    ("key", "came"),
    [
        ("optimizer_class", "returned a type: <class 'torch.optim.adamw.AdamW'>"),
        ("optimizer_closure", r"step\(\) wants more"),
    ],
)
def test_what_an_optimizer_part_returned(job, key, came):
    arguments, _ = shipped(job, "--import", RUN, "--optimizer", key)
    with pytest.raises(ContractError, match=came):
        make_optimizer(arguments, {"weight": torch.nn.Parameter(torch.ones(2, 2))})


def test_a_tracker_and_a_similarity(job):
    arguments, _ = shipped(job, "--import", RUN, "--tracker", "tracker_str")
    with pytest.raises(ContractError, match="without log and close"):
        make_tracker(arguments, job.folder, start_step=0)
    with pytest.raises(ContractError, match="3 similarities were expected"):
        check_sim_fn(sim_fn_register["sim_scalar"])


def test_a_loss_that_says_it_weighs_by_itself_passes(job):
    check_parts(*shipped(job, "--import", RUN, "--loss-fn", "loss_declared"))


def test_a_mistake_inside_a_part_stays_a_crash_with_its_traceback(job):
    done = run(job, "--prompt-fn raises_key_error")
    assert done.code == 9 and "KeyError: 'title' at contract_data_parts.py:" in done.err


@pytest.mark.parametrize("file", ["add_a_part.md", "add_a_part.zh.md"])
def test_the_contracts_are_those_of_the_guide(file):
    """Each register's arguments in an error stand in the guide's table, too."""
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    for register in CONTRACTS.keys() & rows.keys() - {"train_model"}:
        arguments = re.match(r"part\((.*?)\)", CONTRACTS[register])[1]
        assert set(re.findall(r"\w+", arguments)) <= set(re.findall(r"\w+", rows[register]))
