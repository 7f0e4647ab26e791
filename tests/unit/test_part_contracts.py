"""Contracts of components, checked in this process: built-in ones pass, breaches are named.

The breaches that users make most go through the entry file, in tests/scripts/test_contracts.py.
"""

import re
import sys

import pytest
import torch

from commands.train import SHELF
from commands.train_data import check_data
from commands.train_parts import (
    check_parts,
    make_learning_rate,
    make_loss,
    make_optimizer,
    stage_builder,
)
from options.parts import ChosenPart
from parse_args import parse_train_args
from register import (
    ALL_REGISTERS,
    collate_fn_register,
    import_shelf,
    loss_fn_register,
    lr_scheduler_register,
    optimizer_register,
    sim_fn_register,
)
from stageline.errors import ContractError, UserError
from stageline.training.part_checks import check_sim_fn
from tests.helpers.small_run import ROOT, Job
from tests.helpers.tiny_datasets import group_row, write_lines

import_shelf(*SHELF)
DATA, RUN = (ROOT / "tests/scripts" / f"contract_{kind}_parts.py" for kind in ("data", "run"))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def _parts_are_imported_anew():
    """Registers are put back after each test, so the parts have to register again."""
    yield
    for file in (DATA, RUN):
        sys.modules.pop(file.stem, None)


# -- what ships ------------------------------------------------------------------------------

COLLATES = "sft pt contrastive dpo kto rm grpo".split()
LOSSES = [*COLLATES, "distill"]  # the others have collate parts of the same names
POLICY_KINDS = ("grpo", "gspo")
PAIR_KINDS = ("sigmoid", "simpo", "orpo")
OPTIONS = {
    "dpo": [f"--loss-fn.loss_type {kind} --loss-fn.sft_weight 0.5" for kind in PAIR_KINDS],
    "kto": ["", "--loss-fn.use_kl false"],
    "grpo": [f"--loss-fn.loss_type {kind} --rollouts.kl_beta 0.1" for kind in POLICY_KINDS],
    "rm": ["", "--loss-fn.center_coefficient 0.1"],
    "contrastive": ["--sim-fn js", "--sim-fn cos --loss-fn.temperature 0.5"],
    "sft": ["", "--logits-chunk 4"],
    "distill": [f"--loss-fn.beta {beta} --logits-chunk 4" for beta in (0, 0.5)],
}


def write_rows(job):
    """A file of rows for each collate part."""
    pairs, kto = [], []
    for i in range(24):
        question, answer = f"{i}?", "!" * (1 + i % 5)
        pairs.append({"question": question, "chosen": answer, "rejected": "no " * (1 + i % 3)})
        kto.append({"question": question, "answer": answer, "label": i % 3 > 0})
    write_lines(job.folder / "dpo.jsonl", pairs)
    write_lines(job.folder / "rm.jsonl", [row | {"margin": 0.5} for row in pairs])
    write_lines(job.folder / "kto.jsonl", kto)
    write_lines(job.folder / "pt.jsonl", [{"text": f"{i} is a number"} for i in range(24)])
    write_lines(job.folder / "contrastive.jsonl", [group_row(i) for i in range(12)])


def shipped(job, *words):
    """Return the arguments of a training run, and its data, in this process."""
    command = job.command("run", "--num-stages", 2, *words)
    arguments = parse_train_args(command[command.index("--train-model") :])
    return arguments, check_data(arguments)


@pytest.mark.parametrize("key", LOSSES)
def test_shipped_losses_and_collate_parts_pass(job, key):
    for known, register in ((LOSSES, loss_fn_register), (COLLATES, collate_fn_register)):
        assert set(known) == set(register), "a part without a test"
    write_rows(job)
    file = job.folder / f"{key}.jsonl"
    words = ["--loss-fn", key, "--collate-fn", key if key in COLLATES else "sft"]
    if file.exists():
        words += ["--dataset-path", file]
    words += {
        "contrastive": ["--dataset", "groups", "--batch-size", 8, "--micro-batch-size", 4],
        "pt": ["--prompt", "text"],
        "grpo": ["--reward", "contains,format", "--rollouts.max_completion_length", 8],
        "rm": ["--train-model", "reward"],
        "distill": ["--teacher.path", job.model],
    }.get(key, [])
    for options in OPTIONS.get(key, [""]):
        check_parts(*shipped(job, *words, *options.split()))


def test_shipped_optimizers_schedules_and_similarities_pass(job):
    arguments, data = shipped(job, "--total-steps", 5)
    parameters = {
        "layers.0.weight": torch.nn.Parameter(torch.randn(4, 4)),
        "norm.weight": torch.nn.Parameter(torch.ones(4)),
    }
    for key, part in optimizer_register.items():
        if key != "adamw_8bit":  # its package is optional
            arguments.parts["optimizer"] = ChosenPart("optimizer", key, part)
            make_optimizer(arguments, parameters)
    for key, part in lr_scheduler_register.items():
        arguments.parts["lr_scheduler"] = ChosenPart("lr_scheduler", key, part)
        make_learning_rate(arguments)
    for part in sim_fn_register.values():
        check_sim_fn(part)


@pytest.mark.parametrize(("words", "chunk"), [([], 2**23), (["--logits-chunk", 255], 255)])
def test_chunks_of_a_small_vocabulary_are_longer_unless_their_length_is_given(job, words, chunk):
    arguments, _ = shipped(job, *words)
    model = stage_builder(arguments).build(1)
    size = model.whole.get_output_embeddings().weight.shape[0] if not words else 1
    make_loss(arguments, model)
    assert model.logits_chunk == chunk // size


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
    # the signature is taken (an older script's); a loss that does not shift by one is not
    ("--loss-fn loss_of_two", "changes with the label of the first token"),
    ("--loss-fn loss_half_mean", "Half of it was expected"),
    ("--loss-fn loss_mean_over_count", "two halves of them added up"),
    ("--loss-fn loss_float", "returned a float"),
    ("--loss-fn loss_one_element", "a tensor of shape [1]"),
    ("--loss-fn loss_integer", "in int64"),
    ("--loss-fn loss_dict", "a dict with 'loss'"),
    ("--loss-fn loss_three", "a tuple of 3"),
    ("--loss-fn loss_figure_float", "the figure 'mine': a float: 1.0"),
    ("--loss-fn loss_figure_mean", "the figure 'entropy'"),
    ("--loss-fn loss_raises", "reads 'weights', which a micro-batch does not have"),
    ("--loss-fn loss_fails", "Expected target size"),
    ("--loss-fn loss_unshifted", "changes with the label of the first token"),
    ("--lr-scheduler rate_is_a_number", "returned a float"),
    ("--lr-scheduler rate_is_an_object", "returned a LambdaLR"),
]


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # loss_float converts a tensor
@pytest.mark.parametrize(("words", "came"), OTHERS, ids=[one[0].split()[1] for one in OTHERS])
def test_other_ways_to_break_a_contract(job, words, came):
    with pytest.raises(UserError) as caught:
        check_parts(*shipped(job, "--import", DATA, "--import", RUN, *words.split()))
    message = str(caught.value)
    assert came in message and "Contract: " in message
    assert re.search(r" \(tests/scripts/contract_\w+_parts\.py:\d+\)", message), message


@pytest.mark.parametrize(
    ("key", "came"),
    [
        ("stage_plain", "has no get_example_input"),
        ("stage_alone", "returned a model alone"),
        ("stage_example_tensor", "said of the input of stage 0: a tensor"),
        ("stage_example_none", "said of the input of stage 0: None"),
        ("stage_takes_one", r"forward\(self, hidden_or_ids, \*extras, \*\*batch"),
    ],
)
def test_what_a_train_model_part_returned(job, key, came):
    arguments, _ = shipped(job, "--import", RUN, "--train-model", key)
    with pytest.raises(ContractError, match=came):
        stage_builder(arguments).build(0, num_stages=2, device="cpu")


def test_what_other_parts_returned(job, capsys):
    arguments, _ = shipped(job, "--import", RUN, "--optimizer", "optimizer_class")
    with pytest.raises(ContractError, match="returned a type: <class 'torch.optim.adamw.AdamW'>"):
        make_optimizer(arguments, {"weight": torch.nn.Parameter(torch.ones(2, 2))})
    with pytest.raises(ContractError, match="3 similarities are required"):
        check_sim_fn(sim_fn_register["sim_scalar"])
    check_parts(*shipped(job, "--import", RUN, "--loss-fn", "loss_declared"))
    check_parts(*shipped(job, "--import", RUN, "--loss-fn", "loss_on_a_gpu"))
    told = r"before the run: .*needs CUDA at contract_run_parts.py:\d+"
    assert re.search(told, capsys.readouterr().out)


def test_a_chosen_kernel_of_attention_reaches_the_model(job):
    for words, expected in (((), "sdpa"), (("--attention", "eager"), "eager")):
        arguments, _ = shipped(job, *words)
        model = stage_builder(arguments).build(0, num_stages=2, device="cpu")
        assert model.config._attn_implementation == expected


@pytest.mark.parametrize("file", ["add_a_part.md", "add_a_part.zh.md"])
def test_the_contracts_are_those_of_the_guide(file):
    """The arguments that a register says it hands over stand in the guide's table, too."""
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    for name in rows.keys() - {"prompt", "train_model"}:
        words = set(re.findall(r"\w+", ALL_REGISTERS[name].contract))
        assert words <= set(re.findall(r"\w+", rows[name])), name
