"""Each wrong option or combination is one message with its cure, before anything is loaded."""

import pytest

from commands import run_configs
from commands.train import make_plan
from options.command_line import old_names, with_new_names
from options.fields import option_fields
from parse_args import parse_train_args
from register import ALL_REGISTERS

TRAIN = (
    "--dataset rows --prompt p --prompt-fn fill --image-token none --train-model tiny "
    "--collate-fn pack --loss-fn sft --optimizer adamw --lr-scheduler cosine --tracker none "
    "--engine pipeline"
).split()


def rows(*, dataset_path, split="train", limit: int = 3):
    """Rows."""


def needs_one(*, dataset_path, split="train", rows: int):
    """Has an option without a default."""


@pytest.fixture(autouse=True)
def _parts():
    for register in ALL_REGISTERS.values():
        register.data = {}
    for option, key in zip(TRAIN[::2], TRAIN[1::2], strict=True):
        name = option[2:].replace("-", "_")
        ALL_REGISTERS[name][key] = "[ANSWER]" if name == "prompt" else lambda *args, **kwargs: None
    for key, part in {"rows": rows, "needs_one": needs_one}.items():
        ALL_REGISTERS["dataset"].register(key, part, replace=True)


def _error_of(words: list[str]) -> str:
    with pytest.raises(ValueError) as error:
        parse_train_args(words)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--batch-size 7 --micro-batch-size 2", ["--batch-size 7", "not divisible", "6 or 8"]),
        ("--bf16 --fp16", ["--bf16 and --fp16", "Drop one"]),
        ("--learning-rate -1e-4", ["--learning-rate -0.0001", "at least 0"]),
        ("--learning-rate .inf", ["--learning-rate inf is out of range"]),
        ("--warmup-steps 200 --total-steps 100", ["more than --total-steps 100"]),
        ("--min-lr 1 --learning-rate 0.1", ["--min-lr 1 is above --learning-rate 0.1"]),
        ("--save-best loss --eval-samples 0", ["--save-best loss and --eval-samples 0", "Drop"]),
        (
            "--early-stop.patience 2",
            ["--early-stop.patience 2 requires --eval-steps", "Add --eval-steps 100"],
        ),
        ("--eval-samples most", ["--eval-samples most has a wrong value", "all"]),
        (
            "--bad-steps.spike_action skip",
            ["--bad-steps.spike_action skip requires --bad-steps.spike_sigma", "Add"],
        ),
        ("--recompute.every 2", ["--recompute.every 2 requires --gradient-checkpointing"]),
        ("--partition 3,0", ["a stage without a layer"]),
        ("--partition 3,4 --num-stages 3", ["names 2 stages, --num-stages is 3"]),
        ("--vision-stages 2 --num-stages 2", ["leaves no stage", "--num-stages 3 or more"]),
        ("--vision-stages 1 --partition measured", ["--partition measured", "as numbers"]),
        ("--vision-stages 1 --plan", ["--vision-stages 1 and --plan", "Drop one"]),
        ("--vision-partition 2,1 --vision-stages 3", ["names 2 stages, --vision-stages is 3"]),
        (
            "--vision-stages 1 --partition 3,4 --num-stages 2",
            ["names 2 stages, --num-stages is 2 with --vision-stages 1"],
        ),
        ("--model-path /no/such/folder", ["--model-path /no/such/folder", "no such file"]),
        ("--dataset-path no.jsonl", ["--dataset-path no.jsonl", "relative to the directory"]),
        ("--config no.yaml", ["--config no.yaml can't be read", "No such file"]),
        ("--batch-size 1.5", ["--batch-size 1.5 has a wrong value", "a whole number"]),
        ("--batch-size", ["--batch-size has no value", "a whole number"]),
        ("--batch-size 4 5", ["--batch-size 4 5 has 2 values"]),
        ("--batch-siez 4", ["unknown option --batch-siez 4", "Did you mean --batch-size"]),
        ("--dataset.limits 4", ["unknown option --dataset.limits 4", "mean --dataset.limit"]),
        ("--dataset needs_one", ["--dataset.rows is missing"]),
    ],
)
def test_a_wrong_option_is_named_with_its_cure(words, wanted):
    message = _error_of([*TRAIN, *words.split()])
    assert not [text for text in wanted if text not in message], message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--model-name-or-path m", "It is --model-path here."),
        ("--per_device_train_batch_size 4", "It is --micro-batch-size, --batch-size here (batch"),
        ("--gradient_accumulation_steps 3", "It is --batch-size here (more micro-batches"),
        ("--deepspeed c.json", "It is --num-stages here (ZeRO-3 is"),
        ("--do_train", "There is none here: stageline train and stageline eval are commands."),
    ],
)
def test_an_option_of_another_trainer_is_told_its_new_name(old, new):
    message = _error_of([*TRAIN, *old.split()])
    assert message.startswith("unknown option --") and ". " + new in message, message


def test_old_names_lead_to_options_that_there_are():
    everywhere = {name for config in run_configs() for name in option_fields(config)}
    assert set(old_names("moved").values()) <= everywhere
    assert everywhere.isdisjoint(old_names("moved")) and everywhere.isdisjoint(old_names("gone"))


def test_an_option_of_the_release_before_is_told_its_name_now(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text("frozen-vit: false\nllm_learning_rate: null\n")
    message = _error_of(["--config", str(file), "--group-size", "4", *TRAIN])
    for name in ("--parts.vit.frozen", "--parts.llm.lr", "--rollouts.group_size"):
        assert f"is {name} now." in message, message
    saved = {"frozen-vit": True, "batch-size": 4, "pieces": "even", "dataset.rows": "packed"}
    now = {"parts.vit.frozen": True, "batch-size": 4, "dataset.rows": "packed"}
    assert with_new_names(saved) == now


@pytest.mark.parametrize("words", ["--parts.vit 3", "--parts.vit.lora_num 1"])
def test_a_mapping_has_keys(words):
    assert "frozen" in _error_of([*TRAIN, *words.split()])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"batch-size": 010}', "run.json is not JSON: Expecting ',' delimiter: line 1"),
        ('{"seed": 1,\n"seed": 2}', "'seed' comes twice, again in line 2"),
        ('{"a":\t{"seed": 2},\n"sede": 2}', "--a"),
        ('{"seed": 2,\n"output-dir": "\\ud83d\\ude00",\n"sede": 2}', "--sede 2 (in "),
        ('{"seed": 2,\n"sede": 2}', "run.json:2)"),
        ('[{"seed": 2}]', 'options and values: {"batch-size": 8}'),
    ],
)
def test_a_json_config_is_json(text, wanted, tmp_path):
    (tmp_path / "run.json").write_text(text)
    assert wanted in _error_of(["--config", str(tmp_path / "run.json"), *TRAIN])


def test_missing_keys_are_one_error_with_an_example():
    message = _error_of(TRAIN[2:])
    assert message.startswith("--dataset-path is missing. Usual: ")
    assert message.endswith(" --dataset-path rows.jsonl.")
    assert _error_of([*TRAIN[2:], "--nosuch", "1"]).startswith("unknown option --nosuch 1")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("batch-size: [", "is not plain YAML"),
        ("- batch-size\n", "holds a list"),
        ("seed: !!python/object/apply:os.getcwd []\n", "is not plain YAML"),
        ("seed: 1\n\nbatch-siez: 4\n", "run.yaml:3). Did you mean --batch"),
        ("seed: 1\nseed: 2\n", "'seed' comes twice"),
        ("batch-size: 1\nseed: 1\nbatch_size: 2\n", "--batch-size is given twice, in "),
        ("config: other.yaml\n", "A config file reads no other one"),
        ("lora: {rank: 8}\nseed: 1\nlora.rank: 4\n", "--lora.rank is given twice, in "),
    ],
)
def test_a_wrong_config_file_is_named(tmp_path, text, wanted):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    message = _error_of([*TRAIN, "--config", str(file)])
    assert wanted in message
    assert str(file) in message


def test_options_of_a_part_are_not_nested_in_a_config_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("dataset: {limit: 3}\n")
    message = _error_of([*TRAIN[2:], "--config", str(file)])
    assert f"--dataset ({file}:1)" in message and "limit" in message


def test_compiled_layers_have_no_split_backward_pass():
    words = [*TRAIN, "--schedule", "zbv", "--num-stages", "2"]
    with pytest.raises(ValueError, match="Use --schedule 1f1b or drop --compile-layers"):
        make_plan(parse_train_args([*words, "--compile-layers"]))
    make_plan(parse_train_args([*words, "--gradient-checkpointing", "--offload-activations"]))
