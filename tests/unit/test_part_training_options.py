"""Options of single parts: what would do nothing is refused, files of tokens are read."""

import pytest

from commands.train_vocabulary import check_tied_head
from options.fields import handed_to, replaced
from options.model import learning_rate_scales
from options.train import RunConfig
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
        ("--parts.vit.lora_rank 4", ["--parts.vit.lora_rank is about", "Add --vit-lora-num 1"]),
        (
            "--parts.llm.lora_target all",
            ["--parts.llm.lora_target is about", "Add --llm-lora-num 1"],
        ),
        ("--vit-lora-num 1 --parts.vit.lora_rank 0", ["--parts.vit.lora_rank 0 is out of range"]),
        (
            "--parts.vit.frozen --parts.vit.lr 1e-5",
            ["--parts.vit.lr 1e-05 came with --parts.vit.frozen", "Leave one"],
        ),
        (
            "--parts.lm_head.frozen --parts.lm_head.lr 1e-5",
            ["--parts.lm_head.lr 1e-05 came with --parts.lm_head.frozen"],
        ),
        (
            "--learning-rate 0 --parts.vit.lr 1e-5",
            ["came with --learning-rate 0", "a rate of 0 each"],
        ),
        ("--parts.mlp.lr -1", ["--parts.mlp.lr -1 is out of range", "at least 0"]),
        ("--vocab.train_new", ["--vocab.train_new requires --vocab.new_tokens"]),
        ("--vocab.new_tokens <a>,<a>", ["'<a>' in place 2: it is there twice"]),
        ("--vocab.new_tokens @no-such-file", ["--vocab.new_tokens @no-such-file can't be read"]),
    ],
)
def test_what_would_do_nothing_is_refused(words, wanted):
    with pytest.raises(ValueError) as error:
        run_of(words)
    assert error.value.exit_code == 2
    assert not [text for text in wanted if text not in str(error.value)], error.value


def test_options_that_belong_together_are_taken():
    run = run_of(
        "--vit-lora-num 1 --parts.vit.lora_rank 4 --parts.vit.lora_target all --parts.vit.lr 0"
    )
    handed = handed_to("train_model", run)
    assert (handed["vit_lora_rank"], handed["vit_lora_target"]) == (4, ["all"])
    assert "llm_lora_rank" not in handed, "parts need not know what was not given"
    assert learning_rate_scales(run) == {"vit": 0.0}
    run = run_of("--parts.vit.frozen --vit-lora-num 1 --parts.vit.lr 1e-5 --learning-rate 1e-4")
    assert learning_rate_scales(run) == {"vit": pytest.approx(0.1)}
    words = "--parts.llm.frozen --vocab.train_new --vocab.new_tokens <a>,<b> --parts.llm.lr 1e-3"
    assert run_of(words).vocab.new_tokens == ["<a>", "<b>"]


def test_tokens_come_from_a_file_and_are_saved_one_by_one(tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("<3 o'clock>\n\n<left, right>\n")
    arguments = parse_train_args([*TRAIN, "--vocab.new_tokens", f"<a>,@{file}"])
    wanted = ["<a>", "<3 o'clock>", "<left, right>"]
    assert arguments.as_config()["vocab.new_tokens"] == wanted
    file.write_text(f"@{file}\n")
    with pytest.raises(ValueError, match="it begins with @"):
        parse_train_args([*TRAIN, "--vocab.new_tokens", f"@{file}"])


def test_a_tied_head_has_no_rate_and_is_not_frozen_alone(capsys):
    tied, untied = tiny_config("llama", tied=True), tiny_config("llama")
    rate = replaced(RunConfig(), {"parts.lm_head.lr": 1e-4})
    check_tied_head(rate, untied)
    with pytest.raises(UserError, match="--parts.lm_head.lr 0.0001: the head shares"):
        check_tied_head(rate, tied)
    frozen = replaced(RunConfig(), {"parts.lm_head.frozen": True})
    check_tied_head(frozen, untied)
    assert capsys.readouterr().out == ""
    check_tied_head(frozen, tied)
    assert "--parts.lm_head.frozen freezes nothing" in capsys.readouterr().out
    frozen = replaced(frozen, {"parts.llm.frozen": True})
    check_tied_head(frozen, tied)
    assert capsys.readouterr().out == ""
