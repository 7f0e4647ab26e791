"""`tools/import_llamafactory.py`: every key of the example files has an option or a reason.

tests/samples/llamafactory_keys.json holds each key of the YAMLs in their examples/ folder (commit
of November 2026) with the values that it has there.
"""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from commands import option_names
from commands import train as train_pp  # noqa: F401 - its engines
from options import train as train_options
from options.command_line import read_options
from parse_args import parse_chat_args, parse_evaluate_args, parse_train_args
from register import import_shelf
from stageline.errors import UserError
from tests.helpers.forked_entry import run_entry
from tools.import_llamafactory import TABLE, config_text, convert, row_of

import_shelf()
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/from_llamafactory.md"
THEIRS = json.loads((ROOT / "tests/samples/llamafactory_keys.json").read_text())
PARSERS = {"train": parse_train_args, "eval": parse_evaluate_args, "chat": parse_chat_args}
JOB = {"model_name_or_path": "Qwen/Qwen3-4B", "stage": "sft", "dataset": "identity"}
V1 = {"model": "Qwen/Qwen3-4B", "train_dataset": "data/v1_sft_demo.yaml"}
# keys that make sense only with others
BESIDE = {
    "use_llama_pro": {"finetuning_type": "freeze"},
    "freeze_trainable_modules": {"finetuning_type": "freeze"},
    "freeze_extra_modules": {"finetuning_type": "freeze"},
    "use_dora": {"finetuning_type": "lora"},
    "optim_config.": {"optim_config": {"name": "muon"}},
    "flash_attn": {"bf16": True},
    "swanlab": {"use_swanlab": True},
    "run_name": {"report_to": "wandb"},
    "export_": {"export_dir": "merged"},
    "quant_config": {"peft_config": {"name": "lora"}},
    "pref_": {"stage": "dpo"},
    "adam_beta": {"optim": "adamw_torch"},
}
# a future version that counts a run in epochs parses these, too
PENDING = {"num-train-epochs", "warmup-ratio"} - {one.replace("_", "-") for one in option_names()}


@pytest.fixture(autouse=True)
def flash_attention_is_there(monkeypatch):
    there = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))
    monkeypatch.setattr(train_options, "importlib", there)


def nested(key, value):
    outer, _, inner = key.rpartition(".")
    return {outer: {inner: value}} if outer else {key: value}


def job_with(key, value):
    beside = next((more for start, more in BESIDE.items() if key.startswith(start)), {})
    is_v1 = key.startswith(("peft_config", "quant_config", "optim_config", "dist_config"))
    base = {"compute_environment": "LOCAL_MACHINE"} if key.startswith("<|") else JOB
    base = V1 if is_v1 or key in V1 else base
    theirs = {**base, **beside}
    for name, one in nested(key, value).items():
        inner = theirs.get(name)
        theirs[name] = {**inner, **one} if isinstance(inner, dict) else one
    return theirs


def parsed(made, folder):
    """Return the options as Stageline parses them; a folder stands for models and adapters."""
    options = {name: value for name, value in made.options.items() if name not in PENDING}
    options |= {name: str(folder) for name in ("model-path",) if name in options}
    options |= {name: [str(folder)] for name in ("adapter-path",) if name in options}
    made.options = options
    text = config_text(made, source="theirs.yaml", output="ours.yaml")
    (folder / "ours.yaml").write_text(text)
    return PARSERS[made.command](["--config", str(folder / "ours.yaml")])


def pairs():
    return [(key, value) for key, values in THEIRS.items() for value in values]


def test_every_key_is_mapped_or_explained():
    assert len(THEIRS) > 200 and len(pairs()) > 400
    for key, value in pairs():
        row = row_of(key)[1]
        assert "not known here" not in row.get("why", ""), key
        made = convert(job_with(key, value))
        mine = [got for shown, got in made.keys if shown.startswith(f"{key}: ")]
        assert mine, key
        for got in mine:
            if isinstance(got, str):
                assert re.search(r"[.:;] ", got), f"a reason and what to do: {got}"
            elif not got:
                told = row.get("drop") or row.get("note") or value in row.get("words", ())
                assert told or value in (None, False, "all", 1, 0), f"{key}: {value} is passed over"


def test_what_becomes_of_every_value_is_an_option_of_ours(tmp_path):
    """Each result once: words by themselves, numbers and names by their type."""
    seen = set()
    for key, value in pairs():
        made = convert(job_with(key, value))
        if made.command == "export" or "model-path" not in made.options:
            continue
        mine = [got for shown, got in made.keys if shown.startswith(f"{key}: ")][0]
        is_word = "words" in row_of(key)[1] or isinstance(value, bool)
        new = {
            (made.command, name, str(one) if is_word else type(one).__name__)
            for name, one in (mine.items() if isinstance(mine, dict) else ())
        }
        if new - seen:
            parsed(made, tmp_path)
            seen |= new
    assert len(seen) > 60, len(seen)


LORA = {
    **JOB,
    "trust_remote_code": True,
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 16,
    "lora_target": "q_proj, v_proj",
    "dataset": "identity, alpaca_en_demo",
    "template": "qwen3_nothink",
    "cutoff_len": 1024,
    "max_samples": 1000,
    "val_size": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 500,
    "output_dir": "saves/a",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "learning_rate": "1e-4",
    "max_steps": 90,
    "warmup_steps": 9,
    "lr_scheduler_type": "cosine",
    "bf16": True,
    "report_to": "none",
    "resume_from_checkpoint": None,
}


def test_a_whole_job_of_lora(tmp_path):
    made = convert(LORA, cards=2)
    assert [text.splitlines()[0] for text in made.left()] == ["data/dataset_info.json"]
    got = parsed(made, tmp_path)
    run, parts = got.run, got.parts
    assert (run.lora.rank, run.lora.alpha, run.lora.target) == (16, 32, ["q_proj", "v_proj"])
    assert run.llm_lora_num == 1 and run.parts.lm_head.frozen and not run.parts.vit.frozen
    assert (run.batch_size, run.micro_batch_size, run.num_stages) == (2 * 8 * 2, 2, 2)
    assert (run.learning_rate, run.total_steps, run.warmup_steps) == (1e-4, 90, 9)
    assert (run.seed, run.weight_decay) == (42, 0.0), "what holds there without the key"
    assert run.gradient_checkpointing and run.save_steps == 500 and run.max_token_num == 1024
    dataset = parts["dataset"].kwargs
    assert dataset["names"] == ["identity", "alpaca_en_demo"] and dataset["val_size"] == 0.1
    assert parts["prompt_fn"].kwargs["template_options"] == {"enable_thinking": False}
    assert parts["collate_fn"].kwargs["overlong"] == "share"
    assert parts["train_model"].key == "causal_lm" and parts["image_token"].key == "none"


@pytest.mark.parametrize(
    ("theirs", "wanted"),
    [
        ({"finetuning_type": "full"}, {"parts.vit.frozen": True, "parts.mlp.frozen": True}),
        ({"finetuning_type": "full", "freeze_vision_tower": False}, {"parts.mlp.frozen": True}),
        ({"finetuning_type": "lora"}, {"parts.vit.frozen": True, "parts.mlp.frozen": True}),
        ({"freeze_vision_tower": False}, {"vit-lora-num": 1, "parts.mlp.frozen": True}),
        ({"freeze_language_model": True, "finetuning_type": "full"}, {"parts.llm.frozen": True}),
    ],
)
def test_what_is_frozen_of_a_model_that_sees(theirs, wanted, tmp_path):
    model = {"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "template": "qwen2_vl"}
    made = convert({**JOB, **model, "image_max_pixels": 262144, **theirs})
    got = {
        name: made.options.get(name)
        for name in ("parts.vit.frozen", "parts.mlp.frozen", "vit-lora-num")
    }
    got["parts.llm.frozen"] = made.options.get("parts.llm.frozen")
    assert wanted.items() <= got.items()
    if "freeze_vision_tower" in theirs:
        assert got["parts.vit.frozen"] is None
    assert (
        made.options["train-model"] == "vision_language"
        and made.options["images.max_pixels"] == 262144
    )
    assert parsed(made, tmp_path).parts["image_token"].key == "auto"


def test_losses_of_preferences(tmp_path):
    dpo = {**JOB, "stage": "dpo", "pref_beta": 0.2}
    orpo = parsed(convert({**dpo, "pref_loss": "orpo"}), tmp_path).parts["loss_fn"].kwargs
    assert orpo["loss_type"] == "orpo" and orpo["sft_weight"] == 1.0 and orpo["beta"] == 0.2
    simpo = parsed(convert({**dpo, "pref_loss": "simpo"}), tmp_path).parts["loss_fn"].kwargs
    assert simpo["margin"] == 0.5, "their default of simpo_gamma"
    kto_job = {**JOB, "stage": "kto", "kto_chosen_weight": 2.0, "pref_loss": "sigmoid"}
    kto = convert(kto_job)
    assert parsed(kto, tmp_path).parts["loss_fn"].kwargs["desirable_weight"] == 2.0
    assert any("good answers" in text for text in convert({**kto_job, "pref_ftx": 0.1}).left())
    assert any("PPO is not here" in text for text in convert({**JOB, "stage": "ppo"}).left())


def test_quantised_bases(tmp_path):
    four = parsed(convert({**JOB, "quantization_bit": 4}), tmp_path).run
    assert four.quantization == "nf4" and four.double_quantization, "which is their default"
    eight = parsed(convert({**JOB, "quantization_bit": 8}), tmp_path).run
    assert eight.quantization == "int8" and not eight.double_quantization
    plain = convert(JOB).options
    assert "double-quantization" not in plain
    for kind, is_left in (("AQLM-2Bit-1x16", True), ("AWQ", False)):
        ready = convert({**JOB, "model_name_or_path": f"some/Meta-Llama-3-8B-Instruct-{kind}"})
        assert any("that others quantised" in text for text in ready.left()) is is_left


def test_epochs_shares_of_warm_up_and_saves_at_epochs_have_the_names_of_ours():
    made = convert({**JOB, "num_train_epochs": 2, "warmup_ratio": 0.1, "save_strategy": "epoch"})
    assert made.options["num-train-epochs"] == 2.0 and made.options["warmup-ratio"] == 0.1
    assert made.options["save-steps"] == "epoch" and "total-steps" not in made.options


def test_keys_that_change_what_is_learnt_or_said_are_not_passed_over(tmp_path):
    made = convert({**JOB, "label_smoothing_factor": 0.1, "warmup_steps": 0.1})
    assert any(text.startswith("label_smoothing_factor: 0.1") for text in made.left())
    assert made.options["warmup-ratio"] == 0.1 and "warmup-steps" not in made.options
    assert parsed(made, tmp_path).run.warmup_ratio == 0.1
    assert not convert({**JOB, "label_smoothing_factor": 0.0}).left()[1:]
    constant = {"lr_scheduler_type": "constant", "warmup_steps": 9, "warmup_ratio": 0.1}
    assert not {"warmup-steps", "warmup-ratio"} & {*convert({**JOB, **constant}).options}
    assert convert({**JOB, "use_cpu": True}).options["device"] == "cpu"
    told = {
        "logging_steps": 0.1,
        "ignore_pad_token_for_loss": False,
        "use_fast_tokenizer": False,
        "num_machines": 2,
        "init_special_tokens": "desc_init",
        "model_class": "cls",
        "fsdp_offload_params": True,
    }
    for key, value in told.items():
        assert any(text.startswith(key) for text in convert({**JOB, key: value}).left()), key
    judged = {**JOB, "do_predict": True, "do_sample": False, "temperature": 0.9}
    for keys in (judged, dict(reversed(judged.items()))):
        assert convert(keys).options["temperature"] == 0
    # in LLaMA-Factory max_new_tokens, by default 1024, overrides max_length unless it is 0
    assert convert({**judged, "max_length": 9}).options["max-new-tokens"] == 1024
    counted = convert({**judged, "max_length": 9, "max_new_tokens": 0})
    assert any("max-new-tokens" in text for text in counted.left())


def test_other_commands():
    chat = convert({"model_name_or_path": "a", "adapter_name_or_path": "b", "template": "qwen3"})
    sampled = {"temperature": 0.95, "top-p": 0.7, "max-new-tokens": 1024}
    named = {"model-path": "a", "adapter-path": ["b"]}
    assert (chat.command, chat.options) == ("chat", named | sampled), "with their defaults"
    export = convert({"model_name_or_path": "a", "export_dir": "c", "export_size": 5})
    text = config_text(export, source="a.yaml", output="b.yaml")
    assert text.splitlines()[0].endswith("--model-path a --output-path c --max-shard-size 5GB")
    judged = convert({**JOB, "do_predict": True, "eval_dataset": "a", "max_new_tokens": 9})
    assert judged.command == "eval" and judged.options["max-new-tokens"] == 9
    assert judged.options["temperature"] == 0.95, "predict draws there, too"


def test_values_that_ask_for_nothing_or_for_a_share():
    made = convert({**JOB, "max_steps": -1, "eval_dataset": None, "save_steps": 0.1})
    assert made.options["num-train-epochs"] == 3.0 and "total-steps" not in made.options
    assert any(text.startswith("save_steps: 0.1") for text in made.left())
    assert "num-train-epochs" in convert({**JOB, "max_steps": None}).options


def test_a_key_without_a_row_is_told():
    left = convert({**JOB, "no_such_key": 3}).left()
    assert any(text.startswith("no_such_key: 3") and "--help all" in text for text in left)


def run(folder, *words):
    return run_entry([ROOT / "tools/import_llamafactory.py", *words], cwd=folder)


def test_the_command_writes_a_config_and_a_register(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.json").write_text('[{"instruction": "a", "output": "b"}]')
    info = {
        "identity": {"file_name": "rows.json"},
        "hubbed": {"hf_hub_url": "owner/name", "subset": "en", "formatting": "sharegpt"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    theirs = {**JOB, "dataset": "identity,hubbed", "fp8": True}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(theirs))
    done = run(tmp_path, "job.yaml", "--output", "ours.yaml")
    assert done.returncode == 0, done.stderr
    assert "fp8: true" in done.stdout and "Take bf16" in done.stdout
    assert "the set hubbed: subset" in done.stdout
    text = (tmp_path / "ours.yaml").read_text()
    assert read_options(text)[0]["dataset.info"] == "ours.sets.json"
    sets = json.loads((tmp_path / "ours.sets.json").read_text())
    assert sets["identity"] == {"file_name": str(tmp_path / "data/rows.json")}
    assert sets["hubbed"] == {"formatting": "sharegpt", "file_name": "hub:owner/name"}
    comments = re.findall(r"^# (\w+):", text, re.MULTILINE)
    assert {*JOB} <= {*comments}, "each key of theirs has a line"


def test_texts_of_pre_training_are_read_from_their_column(tmp_path):
    info = tmp_path / "dataset_info.json"
    info.write_text('{"c4": {"file_name": "c4.json", "columns": {"prompt": "text"}}}')
    made = convert({**JOB, "stage": "pt", "dataset": "c4"}, info=info)
    assert made.sets["c4"]["columns"] == {"text": "text"} and made.options["packing"] is True
    assert made.sets["c4"]["formatting"] == "text"


def test_nothing_is_written_over_and_what_is_no_yaml_is_refused(tmp_path):
    (tmp_path / "job.yaml").write_text("stage: sft\n")
    (tmp_path / "stageline_job.yaml").touch()
    (tmp_path / "list.yaml").write_text("- 1\n")
    said = {"job.yaml": "there already", "list.yaml": "holds list", "no.yaml": "cannot be read"}
    for word, message in said.items():
        done = run(tmp_path, word)
        assert done.returncode == UserError.exit_code
        assert message in done.stderr and "Traceback" not in done.stderr


# -- the page --------------------------------------------------------------------------------------


def key_table():
    """Return the rows of the table as the page shows them."""
    lines = []
    for section, rows in TABLE.items():
        lines += [f"### {section}", "", "| LLaMA-Factory | Stageline | |", "|---|---|---|"]
        for keys, row in rows.items():
            words = {str(one).lower(): ours for one, ours in row.get("words", {}).items()}
            told = [f"{one}: {shown(ours)}" for one, ours in words.items() if shown(ours) != one]
            remark = row.get("drop") or row.get("why") or row.get("note") or ", ".join(told)
            ours = ", ".join(f"`{one}`" for one in row.get("to", "").split(", ") if one)
            names = " ".join(f"`{key}`" for key in keys.split())
            lines.append(f"| {names} | {ours} | {remark} |")
        lines.append("")
    return "\n".join(lines)


def shown(ours):
    if isinstance(ours, dict):
        return ", ".join(f"{name} {value}" for name, value in ours.items()) or "elsewhere"
    return "nothing" if ours is None else str(ours).lower()


def test_the_page_has_the_table():
    """Compare the page with the table; STAGELINE_BLESS=1 writes it."""
    text = PAGE.read_text(encoding="utf-8")
    start, _, rest = text.partition("<!-- keys -->\n")
    end = rest.partition("<!-- end of keys -->")[2]
    wanted = f"{start}<!-- keys -->\n\n{key_table()}\n<!-- end of keys -->{end}"
    if os.environ.get("STAGELINE_BLESS"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == wanted, "run the test with STAGELINE_BLESS=1"
