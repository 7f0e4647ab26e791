"""Options of check_model.py: those of a training command, where data may be left out."""

import pytest

from commands import check as check_model
from parse_args import parse_check_args, parse_train_args
from register import import_shelf

import_shelf(*check_model.SHELF)
DATA = "--dataset jsonl --prompt question --prompt-fn fill --image-token none --collate-fn sft"
TRAINING = f"--train-model llama {DATA} --num-stages 4 --partition 3,3,3,3 --llm-lora-num 1 --bf16"


def test_a_training_command_is_taken_as_it_is():
    words = TRAINING.split()
    ours, theirs = parse_check_args(words), parse_train_args(words)
    assert ours.parts.keys() == theirs.parts.keys()
    for name in vars(theirs.run):
        if name != "output_dir":  # nothing is written unless it is asked for
            assert getattr(ours.run, name) == getattr(theirs.run, name)
    assert ours.run.output_dir is None


def test_data_may_be_left_out_but_belongs_together():
    assert "dataset" not in parse_check_args(["--train-model", "llama"]).parts
    with pytest.raises(ValueError, match="--dataset-path is missing"):
        parse_check_args("--train-model llama --prompt chat --dataset-path".split() + [""])


@pytest.mark.parametrize(
    ("words", "ranks", "stages"),
    [
        ("", 2, 2),
        ("--schedule zbv", 2, 4),
        ("--partition 1,2,1", 3, 3),
        ("--num-stages 6 --schedule interleaved_1f1b --stages-per-rank 3 --dp-degree 2", 2, 6),
    ],
)
def test_two_ranks_where_no_number_is_given_and_one_replica(words, ranks, stages):
    arguments = parse_check_args(["--train-model", "llama", *words.split()])
    arguments, schedule = check_model.resolve_schedule(arguments)
    assert (schedule.num_ranks, schedule.num_stages) == (ranks, stages)
