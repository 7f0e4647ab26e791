"""Options of single parts: what would do nothing is refused, files of tokens are read."""

from types import SimpleNamespace

import pytest

from commands.train_vocabulary import check_tied_head
from options.fields import handed_to
from options.model import learning_rate_scales
from parse_args import parse_train_args
from register import ALL_REGISTERS
from stageline.errors import UserError
from tests.helpers.tiny_models import tiny_config

TRAIN = (
    "--dataset rows --prompt p --prompt-fn fill --image-token none --train-model tiny "
    "--collate-fn pack --loss-fn sft --optimizer adamw --lr-scheduler cosine --tracker none "
    "--engine pipeline"
).split()


@pytest.fixture(autouse=True)
def _parts():
    for register in ALL_REGISTERS.values():
        register.data = {}
    for option, key in zip(TRAIN[::2], TRAIN[1::2], strict=True):
        name = option[2:].replace("-", "_")
        ALL_REGISTERS[name][key] = "[ANSWER]" if name == "prompt" else lambda *args, **kwargs: None


def run_of(words):
    return parse_train_args([*TRAIN, *words.split()]).run


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--vit-lora-rank 4", ["--vit-lora-rank 4 came without --vit-lora-num", "Add"]),
        ("--llm-lora-target all", ["--llm-lora-target all came without --llm-lora-num"]),
        ("--vit-lora-num 1 --vit-lora-rank 0", ["--vit-lora-rank 0 is out of range"]),
        (
            "--frozen-vit --vit-learning-rate 1e-5",
            ["--vit-learning-rate 1e-05 came with --frozen-vit", "Leave one"],
        ),
        (
            "--frozen-lm-head --lm-head-learning-rate 1e-5",
            ["--lm-head-learning-rate 1e-05 came with --frozen-lm-head"],
        ),
        (
            "--learning-rate 0 --vit-learning-rate 1e-5",
            ["came with --learning-rate 0", "A rate above 0"],
        ),
        ("--mlp-learning-rate -1", ["--mlp-learning-rate -1 is out of range", "at least 0"]),
        ("--train-new-tokens", ["--train-new-tokens came without --new-tokens"]),
        ("--new-tokens <a>,<a>", ["'<a>' in place 2: it is there twice"]),
        ("--new-tokens @no-such-file", ["--new-tokens @no-such-file can't be read"]),
    ],
)
def test_what_would_do_nothing_is_refused(words, wanted):
    with pytest.raises(ValueError) as error:
        run_of(words)
    assert error.value.exit_code == 2
    assert not [text for text in wanted if text not in str(error.value)], error.value


def test_options_that_belong_together_are_taken():
    run = run_of("--vit-lora-num 1 --vit-lora-rank 4 --vit-lora-target all --vit-learning-rate 0")
    handed = handed_to("train_model", run)
    assert (handed["vit_lora_rank"], handed["vit_lora_target"]) == (4, ["all"])
    assert "llm_lora_rank" not in handed, "parts need not know what was not given"
    assert learning_rate_scales(run) == {"vit": 0.0}
    run = run_of("--frozen-vit --vit-lora-num 1 --vit-learning-rate 1e-5 --learning-rate 1e-4")
    assert learning_rate_scales(run) == {"vit": pytest.approx(0.1)}
    words = "--frozen-llm --train-new-tokens --new-tokens <a>,<b> --llm-learning-rate 1e-3"
    assert run_of(words).new_tokens == ["<a>", "<b>"]


def test_tokens_come_from_a_file_and_are_saved_one_by_one(tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("<3 o'clock>\n\n<left, right>\n")
    arguments = parse_train_args([*TRAIN, "--new-tokens", f"<a>,@{file}"])
    wanted = ["<a>", "<3 o'clock>", "<left, right>"]
    assert arguments.as_config()["new-tokens"] == wanted
    file.write_text(f"@{file}\n")
    with pytest.raises(ValueError, match="it begins with @"):
        parse_train_args([*TRAIN, "--new-tokens", f"@{file}"])


def test_a_tied_head_has_no_rate_and_is_not_frozen_alone(capsys):
    tied, untied = tiny_config("llama", tied=True), tiny_config("llama")
    plain = {"lm_head_learning_rate": None, "frozen_lm_head": False, "frozen_llm": False}
    plain |= {"llm_lora_num": 0, "train_new_tokens": False}
    rate = SimpleNamespace(**{**plain, "lm_head_learning_rate": 1e-4})
    check_tied_head(rate, untied)
    with pytest.raises(UserError, match="--lm-head-learning-rate 0.0001 came, and the head shares"):
        check_tied_head(rate, tied)
    frozen = SimpleNamespace(**{**plain, "frozen_lm_head": True})
    check_tied_head(frozen, untied)
    assert capsys.readouterr().out == ""
    check_tied_head(frozen, tied)
    assert "--frozen-lm-head freezes nothing" in capsys.readouterr().out
    frozen.frozen_llm = True
    check_tied_head(frozen, tied)
    assert capsys.readouterr().out == ""
