"""Options: keys, the options of parts, YAML, round trips. Errors are in test_option_errors.py."""

import functools
import json
from typing import Literal

import pytest
import yaml

import parse_args
from commands import run_configs
from commands.train_parts import newer_options
from options.command_line import read_config
from options.fields import handed_to, option_fields, value_of
from options.model import PartTraining
from options.train import RunConfig
from parse_args import parse_evaluate_args, parse_train_args, save_config
from register import ALL_REGISTERS, UnknownKeyError
from stageline.checkpoint.resume import check_same_run
from stageline.errors import CheckpointError

NAMES_OF_THE_FOUNDING_NOTES = """
--model-path --config-path --processor-path --dataset --dataset-path --prompt --prompt-fn
--image-token --collate-fn --loss-fn --batch-size --micro-batch-size --max-token-num
--vit-lora-num --mlp-lora-num --llm-lora-num --bf16
--fp16 --learning-rate --weight-decay --min-lr --warmup-steps --warmup-start-lr --total-steps
--accumulate-steps --eval-steps --save-steps --seed --visual-gpu-ratio
""".split()


class Base:
    def __init__(self, *, dataset_path: str | None, split: str = "train", limit: int | None = None):
        """A base class.

        Args:
            limit: rows to read at most.
        """


class Pictures(Base):
    """Sentences about pictures.

    Args:
        split_type: how train and test are told apart.
    """

    def __init__(
        self,
        *,
        split_type: Literal["random", "zeroshot"] = "random",
        shuffle: bool = False,
        names: list[str] | None = None,
        engine: Base | None = None,
        **more,
    ):
        super().__init__(**more)


def needs_one(*, dataset_path: str | None, split: str = "train", rows: int):
    """Has an option without a default."""


def smooth(logits_BTV, micro_batch: dict, *, num_targets, smoothing: float = 0.0):
    """Cross-entropy, smoothed."""


class Collate:
    """Packs samples."""

    def __call__(self, samples, *, prompt, prompt_fn, image_token, processor, packing: bool = True):
        """Packs."""


def adam(param_groups, *, learning_rate, weight_decay, betas: tuple[float, float] = (0.9, 0.99)):
    """Adam."""


def build(*, stage, num_stages, lora_rank, dtype, depth: int = 2, **model_kwargs):
    """Builds."""


def generate(model, processor, *, images, prompts, max_new_tokens, top_p: float = 1.0):
    """Generates."""


def load(model_path, *, visual_gpu_ratio=0.0, dtype, num_devices, compile_it: bool = False):
    """Loads."""


@pytest.fixture(autouse=True)
def _parts():
    """Register a few components in place of all others."""
    for register in ALL_REGISTERS.values():
        register.is_frozen = False
        register.data = {}
    shelf = {
        "dataset": {"pictures": Pictures, "needs_one": needs_one},
        "loss_fn": {"sft": smooth, "sft_05": functools.partial(smooth, smoothing=0.5)},
        "collate_fn": {"pack": Collate()},
        "optimizer": {"adamw": adam},
        "train_model": {"tiny": build},
        "prompt": {"vqa": "[IMAGE]\n[ANSWER]"},
        "prompt_fn": {"fill": lambda sample, prompt, *, processor=None: None},
        "image_token": {"none": lambda rendered, images, *, processor: None},
        "lr_scheduler": {"cosine": lambda *, learning_rate, min_lr, cycles=1: None},
        "tracker": {"nowhere": lambda *, folder, config, start_step: None},
        "engine": {"pipeline": lambda plan, data, *, turbo=False: None},
        "model": {"generate": generate},
        "builder": {"load": load},
        "metric": {"exact": lambda predictions, samples, *, ignore_case=False: None},
    }
    for name, parts in shelf.items():
        ALL_REGISTERS[name].update(parts)


def test_a_list_takes_the_place_of_a_default_list():
    def tasks(predictions, samples, *, names: list[str] = ["a", "b"]):  # noqa: B006
        """Named tasks."""

    ALL_REGISTERS["metric"]["tasks"] = tasks
    words = [*SHARED, "--model", "generate", "--builder", "load", "--metric", "tasks"]
    chosen = parse_evaluate_args([*words, "--metric.names", "[c]"]).parts["metric"]
    assert chosen.kwargs == {"names": ["c"]}


SHARED = "--dataset pictures --prompt vqa --prompt-fn fill --image-token none".split()
TRAIN = [*SHARED, *"--train-model tiny --collate-fn pack --tracker nowhere".split()]


def train(*words: str) -> parse_args.TrainArguments:
    return parse_train_args([*TRAIN, *words])


def test_every_name_of_the_founding_notes_is_an_option(capsys):
    with pytest.raises(SystemExit) as end:
        train("--help", "all")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert not [name for name in NAMES_OF_THE_FOUNDING_NOTES if f"  {name} " not in shown]


def test_options_of_a_part_are_its_signature_less_what_the_run_supplies():
    parts = train().parts
    assert {name: part.kwargs for name, part in parts.items() if part.kwargs} == {
        "train_model": {"depth": 2},
        # `limit` is of the base class, reached through **more; `engine` has another type
        "dataset": {"split_type": "random", "shuffle": False, "names": None, "limit": None},
        "collate_fn": {"packing": True},
        "loss_fn": {"smoothing": 0.0},
        "optimizer": {"betas": (0.9, 0.99)},
        "lr_scheduler": {"cycles": 1},
        "engine": {"turbo": False},
    }


def test_options_of_parts_are_converted_by_their_types():
    parts = train(
        *"--dataset.split_type zeroshot --dataset.shuffle --dataset.names a b".split(),
        *"--dataset.limit=3 --optimizer.betas 0.8,0.9 --loss-fn.smoothing 1e-1".split(),
        *"--collate-fn.packing false".split(),
    ).parts
    assert parts["dataset"].kwargs == {
        **dict(split_type="zeroshot", shuffle=True, names=["a", "b"], limit=3)
    }
    assert parts["optimizer"].kwargs == {"betas": (0.8, 0.9)}
    assert parts["loss_fn"].kwargs == {"smoothing": 0.1}
    assert parts["collate_fn"].kwargs == {"packing": False}


def test_what_a_partial_binds_is_no_option():
    assert train("--loss-fn", "sft_05").parts["loss_fn"].kwargs == {}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--batch-size 8", "batch_size", 8),
        ("--batch-size=8", "batch_size", 8),
        ("--parts.vit.frozen", "parts.vit.frozen", True),
        ("--parts.vit.frozen=false", "parts.vit.frozen", False),
        ("--parts.vit.frozen --seed 3", "seed", 3),
        ("--learning-rate 1", "learning_rate", 1.0),
        ("--lora.target q_proj,v_proj", "lora.target", ["q_proj", "v_proj"]),
        ("--lora.target q_proj", "lora.target", ["q_proj"]),
        ("--partition 7", "partition", [7]),
        ("--partition parameters", "partition", "parameters"),
        ("--output-dir 123", "output_dir", "123"),
        ("--eval-samples all", "eval_samples", "all"),
    ],
)
def test_spellings_and_types(words, name, value):
    assert value_of(train(*words.split()).run, name) == value


def test_paths_are_expanded_and_an_empty_one_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    run = train("--model-path", "~/model", "--dataset-path", "", "--output-dir", "~/out").run
    assert run.model_path == str(tmp_path / "model")
    assert run.output_dir == str(tmp_path / "out")
    assert run.dataset_path is None


def test_stages_follow_from_partition():
    assert train("--partition", "8,8,7,9").run.num_stages == 4
    run = train("--partition", "8,8", "--vision-partition", "3,4,2").run
    assert (run.vision_stages, run.num_stages) == (3, 5)
    assert train().run.num_stages is None  # the processes decide


def test_config_file_gives_options_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "dataset: pictures\ndataset.split_type: zeroshot\nbatch-size: 8\nmicro_batch_size: 4\n"
        "parts: {vit: {frozen: true, lr: 1e-5}}\nlora.target: [a, b]\nloss-fn: sft\n"
        "parts.lm_head.frozen: true\nvit-lora-num: 1\nlearning-rate: 1e-3\n"
    )
    arguments = train("--config", str(file), "--batch-size", "12")
    run = arguments.run
    assert (run.batch_size, run.micro_batch_size, run.parts.vit.frozen) == (12, 4, True)
    assert run.parts.lm_head.frozen and run.parts.vit.lr == 1e-5
    assert (run.learning_rate, run.lora.target) == (1e-3, ["a", "b"])
    assert arguments.parts["dataset"].kwargs["split_type"] == "zeroshot"
    # also when it comes first on the command line
    assert parse_train_args(["--batch-size", "12", "--config", str(file), *TRAIN]).run == run


def test_a_mapping_is_read_on_the_command_line_and_in_a_saved_config(tmp_path):
    words = ("--parts", "{vit: {frozen: true, lr: 1e-5}, llm: {lora_rank: 4}}", "--lora.rank", "2")
    arguments = train(*words, "--vit-lora-num", "1", "--llm-lora-num", "1")
    run = arguments.run
    assert run.parts.vit == PartTraining(frozen=True, lr=1e-5) and run.lora.rank == 2
    handed = handed_to("train_model", run)
    assert (handed["frozen_vit"], handed["lora_rank"], handed["llm_lora_rank"]) == (True, 2, 4)
    assert "vit_lora_rank" not in handed
    save_config(arguments, tmp_path / "config.yaml")
    again = parse_train_args(["--config", str(tmp_path / "config.yaml")]).run
    assert (again.parts, again.lora) == (run.parts, run.lora)


def test_numbers_in_lists_of_a_config_file_are_numbers(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "optimizer.betas: [1e-1, 9.5e-1]\nlimit: null\nnames: &n [1e3, '1e3', on]\nagain: *n\n"
        'extra: {top_p: 1e-4, name: "1e-4", deep: [{x: -2E+2}]}\nlearning-rate: 1e-4\n'
    )
    given = {item.name: item for item in read_config(file)}
    assert given["optimizer.betas"].values == ["[0.1, 0.95]"]
    assert given["limit"].values == ["null"]
    assert json.loads(given["names"].values[0]) == [1000.0, "1e3", True]
    assert given["again"].values == given["names"].values
    extra = {"top_p": 1e-4, "name": "1e-4", "deep": [{"x": -200.0}]}
    assert json.loads(given["extra"].values[0]) == extra
    assert given["learning_rate"].values == ["1e-4"]  # the option's type says what it is
    assert given["learning_rate"].origin == f"{file}:6"


def test_a_value_of_a_config_file_is_what_stands_there(tmp_path):
    """YAML 1.1 would make 15, 45045, a quoted date, 1.5 and False of these names."""
    file = tmp_path / "run.yaml"
    for name in ("0017", "12:30:45", "2026-01-01", "1.50", "no"):
        file.write_text(f"output-dir: {name}\nbatch-size: 010\nbf16: yes\n")
        run = train("--config", str(file)).run
        assert (run.output_dir, run.batch_size, run.bf16) == (name, 10, True)


def test_a_json_file_is_read_as_well(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(
        '{\n\t"learning-rate": 1e-3,\n\t"lora.target": ["a", "b"],\n\t"parts.vit.frozen": true,'
        '\n\t"model-path": null\n}\n'
    )
    run = train("--config", str(file)).run
    assert (run.learning_rate, run.lora.target, run.parts.vit.frozen) == (1e-3, ["a", "b"], True)
    assert run.model_path is None


def test_a_later_config_file_wins(tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number}.yaml").write_text(f"seed: {number}\nnum-workers: {number}\n")
    (tmp_path / "2.yaml").write_text("seed: 2\n")
    run = train("--config", str(tmp_path / "1.yaml"), "--config", str(tmp_path / "2.yaml")).run
    assert (run.seed, run.num_workers) == (2, 1)


def test_a_saved_config_repeats_the_run_from_another_directory(tmp_path, monkeypatch):
    data, elsewhere = tmp_path / "rows.jsonl", tmp_path / "elsewhere"
    data.touch()
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    first = train(
        *"--dataset-path rows.jsonl --output-dir out --partition 2,3 --learning-rate 3e-5".split(),
        *"--dataset.names x y --dataset.split_type zeroshot --optimizer.betas 0.5,0.6".split(),
        *"--bf16 --lora.target q --loss-fn.smoothing 1e-7 --check-only".split(),
    )
    save_config(first, tmp_path / "out" / "config.yaml")
    config = first.as_config()
    monkeypatch.chdir(elsewhere)
    again = parse_train_args(["--config", str(tmp_path / "out" / "config.yaml")])
    assert again.run.dataset_path == str(data)
    assert again.run.output_dir == str(tmp_path / "out")
    assert not again.run.check_only
    assert again.as_config() == config
    assert {name: part.kwargs for name, part in again.parts.items()} == {
        name: part.kwargs for name, part in first.parts.items()
    }
    # every option is in the file: a changed default must not change an old run
    saved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert saved["weight-decay"] == 0.01 and saved["dataset.limit"] is None


def test_imports_are_saved_with_their_place(tmp_path, monkeypatch):
    file = tmp_path / "parts_for_saving.py"
    file.write_text("from register import loss_fn_register\nloss_fn_register['from_file'] = max\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # the fixture takes it away again
    arguments = train("--import", "parts_for_saving.py", "--loss-fn", "from_file")
    assert arguments.as_config()["import"] == [str(file)]
    save_config(arguments, tmp_path / "config.yaml")
    del ALL_REGISTERS["loss_fn"]["from_file"]
    monkeypatch.delitem(__import__("sys").modules, "parts_for_saving")
    monkeypatch.chdir("/")
    again = parse_train_args(["--config", str(tmp_path / "config.yaml")])
    assert again.parts["loss_fn"].part is max


def test_help_lists_the_options_of_chosen_parts_with_type_default_and_docstring(capsys):
    with pytest.raises(SystemExit):
        train("--help", "--loss-fn", "sft")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--dataset.split_type random|zeroshot how train and test are told apart (" in shown
    assert "--dataset.limit N rows to read at most" in shown
    assert "--loss-fn.smoothing X (default: 0)" in shown
    assert "Sentences about pictures. [tests/unit/test_parse_args.py:" in shown
    assert "--dataset.split " not in shown and "--dataset.engine" not in shown


@pytest.mark.parametrize("name", sorted(parse_args.TRAIN_KEYS))
def test_an_unknown_key_of_each_register_is_one_clear_error(name):
    option = "--" + name.replace("_", "-")
    with pytest.raises(UnknownKeyError) as error:
        train(option, "no_such_key")
    assert f"{option} no_such_key: there is no {name} 'no_such_key'." in str(error.value)


def test_a_key_from_a_file_names_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("loss-fn: sfd\n")
    with pytest.raises(UnknownKeyError) as error:
        train("--config", str(file))
    assert f"--loss-fn ({file}:1)" in str(error.value)
    assert "Did you mean 'sft'" in str(error.value)


@pytest.mark.parametrize("config_class", [*run_configs(), RunConfig], ids=lambda one: one.__name__)
def test_a_default_that_nobody_gives_is_what_reading_it_would_make(config_class):
    """Only given options are read: jsonargparse would change no default and refuse none."""
    parser = parse_args._build_parser(option_fields(config_class).values(), {}, listed={})
    made = parser.parse_args([])
    for item in option_fields(config_class).values():
        assert (made[item.name], type(made[item.name])) == (item.default, type(item.default))


def test_a_checkpoint_that_is_older_than_an_option_had_its_default():
    saved, told = {"batch-size": 32}, []

    def check(group_size):
        now = {"batch-size": 32, "rollouts.group_size": group_size}
        earlier = {**newer_options(RunConfig(), now), **saved}
        check_same_run(
            earlier, now, may_change=lambda name: False, allows_changes=False, say=told.append
        )

    check(RunConfig().rollouts.group_size)
    with pytest.raises(CheckpointError, match="rollouts.group_size: 8 then, 4 now"):
        check(4)
    assert not told
