"""Options of LoRA, parts and freezing: those without effect are refused, the others are kept."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from commands import with_folders
from commands.train import make_plan
from commands.train_data import check_tied_head
from options.fields import OptionError, given_options, handed_to, replaced
from options.model import TrainedOptions, adapter_arguments, learning_rate_scales, method_arguments
from options.train import RunConfig
from parse_args import parse_evaluate_args, parse_train_args, save_config
from register import ALL_REGISTERS
from stageline.errors import UserError
from stageline.modules.methods import FreezeRule, Methods
from tests.helpers.tiny_models import tiny_config

TRAIN = (
    "--dataset rows --prompt p --prompt-fn fill --image-token none --train-model tiny "
    "--collate-fn pack --loss-fn sft --optimizer adamw --lr-scheduler cosine --tracker none "
    "--engine pipeline"
).split()
EVALUATE = (
    "--dataset rows --prompt p --prompt-fn fill --image-token none --model m --builder b "
    "--metric e --model-path base"
).split()


@pytest.fixture(autouse=True)
def _parts(monkeypatch, tmp_path):
    """Parts of every register, and folders for models and adapters in the working folder."""
    for register in ALL_REGISTERS.values():
        register.data = {}
    words = TRAIN + EVALUATE[:-2]
    for option, key in set(zip(words[::2], words[1::2], strict=True)):
        name = option[2:].replace("-", "_")
        ALL_REGISTERS[name][key] = "[ANSWER]" if name == "prompt" else lambda *args, **kwargs: None
    monkeypatch.chdir(tmp_path)
    for name in ("base", "a", "b"):
        (tmp_path / name).mkdir()


def parsed(words):
    return parse_train_args([*TRAIN, *words.split()])


def run_of(words):
    return parsed(words).run


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--parts.vit.lora_rank 4", "Add --vit-lora-num 1"),
        ("--vit-lora-num 1 --parts.vit.lora_rank 0", "--parts.vit.lora_rank 0 is out of range"),
        ("--parts.vit.frozen --parts.vit.lr 1e-5", "--parts.vit.frozen exclude"),
        ("--parts.lm_head.frozen --parts.lm_head.lr 1e-5", "--parts.lm_head.frozen exclude"),
        ("--learning-rate 0 --parts.vit.lr 1e-5", "--learning-rate 0"),
        ("--parts.mlp.lr -1", "--parts.mlp.lr -1 is out of range"),
        ("--vocab.train_new", "--vocab.train_new requires --vocab.new_tokens"),
        ("--vocab.new_tokens <a>,<a>", "twice"),
        ("--vocab.new_tokens @no-such-file", "--vocab.new_tokens @no-such-file"),
        ("--lora.use_dora", "--lora.use_dora requires --llm-lora-num"),
        ("--lora.modules_to_save embed_tokens", "requires --llm"),
        ("--lora.use_rslora --model-path base --adapter-path a", "requires --llm"),
        ("--llm-lora-num 1 --lora.init pisa", "--lora.init pisa"),
        ("--llm-lora-num 1 --lora.init pissa_niter_0", "pissa_niter_0"),
        ("--llm-lora-num 1 --lora.init pissa", "requires --model-path"),
        ("--create-new-adapter", "requires --adapter-path"),
        ("--adapter-path a", "requires --model-path"),
        ("--model-path base --adapter-path a,c", "--adapter-path c"),
        ("--model-path base --adapter-path a --llm-lora-num 2", "--llm-lora-num above 1"),
        ("--model-path base --adapter-path a --create-new-adapter", "requires --llm"),
        (
            "--model-path base --adapter-path a --llm-lora-num 1 --lora.init gaussian",
            "Add --create-new-adapter",
        ),
        ("--neftune-alpha -1", "--neftune-alpha -1 is out of range"),
        ("--freeze.llama_pro", "--freeze.llama_pro requires --freeze.layers"),
        ("--freeze.extra norm", "--freeze.extra norm requires"),
        ("--freeze.layers 2 --llm-lora-num 1", "--llm-lora-num exclude each other"),
        ("--fp32.norms", "--fp32.norms requires --bf16 or --fp16"),
        ("--quantization nf4", "requires --llm-lora-num"),
        ("--quantization int8 --llm-lora-num 1", "requires --model-path"),
        ("--double-quantization", "requires --quantization nf4"),
    ],
)
def test_what_would_do_nothing_is_refused(words, wanted):
    with pytest.raises(ValueError) as error:
        run_of(words)
    assert error.value.exit_code == 2
    assert wanted in str(error.value)


def test_options_of_parts_that_belong_together_are_taken():
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


def test_options_of_lora_are_handed_on_and_nothing_else(tmp_path):
    assert given_options(run_of("--llm-lora-num 1"), of=TrainedOptions) == {"llm_lora_num": 1}
    arguments = parsed(
        "--llm-lora-num 1 --lora.use_rslora --lora.use_dora --lora.init pissa_niter_4 "
        "--model-path base --lora.exclude o_proj,down_proj --lora.modules_to_save embed_tokens "
        "--adapter-path a,b --create-new-adapter --neftune-alpha 5"
    )
    assert given_options(arguments.run, of=TrainedOptions) == {
        "llm_lora_num": 1,
        **{"lora.use_rslora": True, "lora.use_dora": True, "lora.init": "pissa_niter_4"},
        **{"lora.exclude": ["o_proj", "down_proj"], "lora.modules_to_save": ["embed_tokens"]},
        **{"adapter_path": ["a", "b"], "create_new_adapter": True, "neftune_alpha": 5.0},
    }
    saved = arguments.as_config()
    assert saved["adapter-path"] == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"adapter_path": None}),
        ("--adapter-path a", {"adapter_path": "a"}),
        (
            "--adapter-path a,b --adapter-weights 1,0.5",
            {"adapter_path": ["a", "b"], "adapter_weights": [1.0, 0.5]},
        ),
    ],
)
def test_adapters_of_an_evaluation(words, expected):
    assert adapter_arguments(parse_evaluate_args([*EVALUATE, *words.split()]).run) == expected
    with pytest.raises(OptionError, match="1 numbers for 2 folders"):
        adapter_arguments(SimpleNamespace(adapter_path=["a", "b"], adapter_weights=[1.0]))


def test_options_of_methods():
    assert method_arguments(run_of("")) == {}
    told = method_arguments(run_of("--freeze.layers -2 --freeze.modules mlp,q_proj"))["methods"]
    assert Methods.of(told) == Methods(freeze=FreezeRule(-2, ("mlp", "q_proj")))
    words = "--bf16 --fp32.norms --rope-scaling yarn --max-token-num 100"
    made = Methods.of(method_arguments(run_of(words))["methods"])
    assert made.norms_fp32 and made.rope_scaling.max_token_num == 100 and made.freeze is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_saved_config_repeats_a_run_with_dtype_auto(dtype, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": dtype}))
    words = ["--model-path", str(tmp_path), "--output-dir", str(tmp_path / "run")]
    first = parse_train_args([*TRAIN, *words, "--dtype", "auto", "--fp32.norms", "--fp32.logits"])
    first = replace(first, run=with_folders(first.run))
    assert (first.run.fp32.norms, bool(first.run.fp32.logits)) == (dtype != "float32",) * 2
    save_config(first, tmp_path / "config.yaml")
    again = parse_train_args(["--config", str(tmp_path / "config.yaml")])
    assert with_folders(again.run) == again.run == first.run


@pytest.mark.parametrize(
    ("words", "draws", "expected"),
    [
        ("--bf16", True, True),
        ("--fp16", True, True),
        ("--bf16 --fp32.logits false", True, False),
        ("--fp32.logits false", True, False),
        ("", True, False),
        ("--bf16", False, False),
        ("--bf16 --fp32.logits", False, True),
    ],
)
def test_the_head_is_in_float32_where_answers_are_drawn(words, draws, expected):
    parts = {"engine": SimpleNamespace(key="pipeline", facts=SimpleNamespace(topology=None))}
    parts["optimizer"] = SimpleNamespace(facts=SimpleNamespace(needs_whole=False))
    parts["loss_fn"] = SimpleNamespace(facts=SimpleNamespace(samples_answers=draws))
    plan = make_plan(SimpleNamespace(run=run_of(words), parts=parts, imports=()))
    assert plan.run.fp32.logits is expected
    assert ("methods" in method_arguments(plan.run)) == expected


def test_a_head_in_float32_is_on_or_off():
    with pytest.raises(OptionError, match="fp32.logits"):
        run_of("--bf16 --fp32.logits half")


def test_tokens_come_from_a_file_and_are_saved_one_by_one(tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("<3 o'clock>\n\n<left, right>\n")
    arguments = parse_train_args([*TRAIN, "--vocab.new_tokens", f"<a>,@{file}"])
    wanted = ["<a>", "<3 o'clock>", "<left, right>"]
    assert arguments.as_config()["vocab.new_tokens"] == wanted


def test_a_tied_head_has_no_rate_and_is_not_frozen_alone(capsys):
    tied, untied = tiny_config("llama", tied=True), tiny_config("llama")
    rate = replaced(RunConfig(), {"parts.lm_head.lr": 1e-4})
    check_tied_head(rate, untied)
    with pytest.raises(UserError, match="--parts.lm_head.lr"):
        check_tied_head(rate, tied)
    frozen = replaced(RunConfig(), {"parts.lm_head.frozen": True})
    check_tied_head(frozen, untied)
    assert capsys.readouterr().out == ""
    check_tied_head(frozen, tied)
    assert "--parts.lm_head.frozen freezes nothing" in capsys.readouterr().out
    frozen = replaced(frozen, {"parts.llm.frozen": True})
    check_tied_head(frozen, tied)
    assert capsys.readouterr().out == ""
