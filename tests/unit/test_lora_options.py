"""Options of the LoRA family: what would do nothing is refused, and what was given is handed on."""

from types import SimpleNamespace

import pytest

from options.fields import OptionError, given_options
from options.model import TrainedOptions, adapter_arguments
from parse_args import parse_evaluate_args, parse_train_args
from register import ALL_REGISTERS

TRAIN = (
    "--dataset rows --prompt p --prompt-fn fill --image-token none --train-model tiny "
    "--collate-fn pack --loss-fn sft --optimizer adamw --lr-scheduler cosine --tracker none "
    "--engine pipeline "
    "--model m --builder b --metric e"
).split()
EVALUATE = ("--model", "--builder", "--metric")


@pytest.fixture(autouse=True)
def _parts(monkeypatch, tmp_path):
    for register in ALL_REGISTERS.values():
        register.data = {}
    for option, key in zip(TRAIN[::2], TRAIN[1::2], strict=True):
        name = option[2:].replace("-", "_")
        ALL_REGISTERS[name][key] = "[ANSWER]" if name == "prompt" else lambda *args, **kwargs: None
    monkeypatch.chdir(tmp_path)
    for name in ("base", "a", "b"):
        (tmp_path / name).mkdir()


def run_of(words):
    pairs = zip(TRAIN[::2], TRAIN[1::2], strict=True)
    keys = [word for pair in pairs if pair[0] not in EVALUATE for word in pair]
    return parse_train_args([*keys, *words.split()])


def given(run):
    return given_options(run, of=TrainedOptions)


def test_what_was_given_is_handed_on_and_nothing_else(tmp_path):
    assert given(run_of("--llm-lora-num 1").run) == {"llm_lora_num": 1}
    words = (
        "--llm-lora-num 1 --lora.use_rslora --lora.use_dora --lora.init pissa_niter_4 "
        "--model-path base --lora.exclude o_proj,down_proj --lora.modules_to_save embed_tokens "
        "--adapter-path a,b --create-new-adapter --neftune-alpha 5"
    )
    arguments = run_of(words)
    assert given(arguments.run) == {
        "llm_lora_num": 1,
        **{"lora.use_rslora": True, "lora.use_dora": True, "lora.init": "pissa_niter_4"},
        **{"lora.exclude": ["o_proj", "down_proj"], "lora.modules_to_save": ["embed_tokens"]},
        **{"adapter_path": ["a", "b"], "create_new_adapter": True, "neftune_alpha": 5.0},
    }
    saved = arguments.as_config()
    assert saved["adapter-path"] == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora.use_dora", "--lora.use_dora requires --llm-lora-num or --vit-lora-num or"),
        (
            "--lora.modules_to_save embed_tokens",
            "--lora.modules_to_save embed_tokens requires --llm",
        ),
        (
            "--lora.use_rslora --model-path base --adapter-path a",
            "--lora.use_rslora requires --llm",
        ),
        ("--llm-lora-num 1 --lora.init pisa", "--lora.init pisa is no start of an adapter"),
        ("--llm-lora-num 1 --lora.init pissa_niter_0", "pissa_niter_0 is no start"),
        ("--llm-lora-num 1 --lora.init pissa", "--lora.init pissa requires --model-path"),
        ("--create-new-adapter", "--create-new-adapter requires --adapter-path"),
        ("--adapter-path a", "--adapter-path a requires --model-path"),
        ("--model-path base --adapter-path a,c", "--adapter-path c: there is no such file"),
        ("--model-path base --adapter-path a --llm-lora-num 2", "--llm-lora-num above 1"),
        ("--model-path base --adapter-path a --create-new-adapter", "requires --llm"),
        (
            "--model-path base --adapter-path a --llm-lora-num 1 --lora.init gaussian",
            "came with an adapter that is trained on",
        ),
        ("--neftune-alpha -1", "--neftune-alpha -1 is out of range"),
    ],
)
def test_what_would_do_nothing(words, message):
    with pytest.raises(OptionError, match=message):
        run_of(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"adapter_path": None}),
        ("--adapter-path a", {"adapter_path": "a"}),
        ("--adapter-path a,b", {"adapter_path": ["a", "b"]}),
        (
            "--adapter-path a,b --adapter-weights 1,0.5",
            {"adapter_path": ["a", "b"], "adapter_weights": [1.0, 0.5]},
        ),
    ],
)
def test_adapters_of_an_evaluation(words, expected):
    names = ("model", "builder", "dataset", "prompt", "prompt-fn", "image-token", "metric")
    pairs = zip(TRAIN[::2], TRAIN[1::2], strict=True)
    keys = [word for pair in pairs if pair[0][2:] in names for word in pair]
    run = parse_evaluate_args([*keys, "--model-path", "base", *words.split()]).run
    assert adapter_arguments(run) == expected


def test_as_many_weights_as_adapters():
    run = SimpleNamespace(adapter_path=["a", "b"], adapter_weights=[1.0])
    with pytest.raises(OptionError, match="has 1 numbers for 2 folders"):
        adapter_arguments(run)
