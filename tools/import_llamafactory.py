"""Convert a LLaMA-Factory YAML to a config file of Stageline, and list what is left.

`python tools/import_llamafactory.py FILE.yaml`. The table options/llamafactory_keys.yaml, shown in
docs/from_llamafactory.md, has the mapping of each key. Nothing is downloaded.
"""

import argparse
import dataclasses
import fnmatch
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from options.answer import ChatConfig, EvaluateConfig
from options.export import ExportConfig
from options.train import RunConfig
from parse_args import CHAT_KEYS, EVALUATE_KEYS, TRAIN_KEYS
from stageline.distributed.failure import run_entry
from stageline.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
Theirs = Mapping[str, Any]
Ours = dict[str, Any]
Row = Mapping[str, Any]
TABLE: dict[str, dict[str, Row]] = yaml.safe_load(
    (ROOT / "options" / "llamafactory_keys.yaml").read_text(encoding="utf-8")
)
INFO = "dataset_info.json"
TAKEN_BY = {
    "train": {field.name for field in dataclasses.fields(RunConfig)} | {*TRAIN_KEYS},
    "eval": {field.name for field in dataclasses.fields(EvaluateConfig)} | {*EVALUATE_KEYS},
    "chat": {field.name for field in dataclasses.fields(ChatConfig)} | {*CHAT_KEYS},
    "export": {field.name for field in dataclasses.fields(ExportConfig)},
}
# the names of models and templates that accept images contain one of these
PICTURED = re.compile(
    r"vl|llava|vision|pixtral|gemma-?[34]|mllama|smolvlm|idefics|glm-?4\S*v|minicpm|qwen3[._]5"
)

# models that others have quantized, and that cannot be dequantized
READY_MADE = re.compile(r"(?i)-(aqlm|hqq)\b")


@dataclass
class Imported:
    """A LLaMA-Factory file, converted.

    Attributes:
        command: of `stageline`, that takes the options.
        options: Stageline's, as a config file names them.
        keys: (LLaMA-Factory's key with its value, options that came of it or why none did).
        sets: entries of a register of data sets, where LLaMA-Factory's needs a change.
    """

    command: str
    options: Ours = field(default_factory=dict)
    keys: list[tuple[str, Ours | str]] = field(default_factory=list)
    sets: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, got: Ours | str) -> None:
        """Add the options of a key, as far as the command has them."""
        if isinstance(got, dict):
            got = _taken(got, self.command)
        self.keys.append((key, got))
        if isinstance(got, dict):
            self.options |= got

    def left(self) -> list[str]:
        """Return the keys that could not be mapped, each with its reason and what to do."""
        reasons = dict.fromkeys(why for _, why in self.keys if isinstance(why, str))
        keys = {why: [key for key, got in self.keys if got == why] for why in reasons}
        return [f"{', '.join(keys[why])}\n    {why}" for why in reasons]


# -- functions that `by` in the table names: (value, all keys, row) -> options, or why not ---------


def _names(value: Any) -> list[str]:
    words = value if isinstance(value, list) else str(value).split(",")
    return [str(word).strip() for word in words]


def _is_lora(theirs: Theirs) -> bool:
    return theirs.get("finetuning_type") in ("lora", "oft")


def _has_pictures(theirs: Theirs) -> bool:
    names = [str(theirs.get(key, "")) for key in ("template", "model_name_or_path")]
    config = Path(names[1], "config.json")
    if config.is_file():
        return "vision_config" in json.loads(config.read_text(encoding="utf-8"))
    return any(PICTURED.search(name.lower()) for name in names)


def _stage(value: str, theirs: Theirs, row: Row) -> Ours | str:
    if value == "ppo":
        return "PPO is not here. Train with dpo or kto on answers that were drawn before."
    overlong = {"sft": "share", "pt": "cut"}.get(value, "cut_prompt")
    loss = {"collate-fn": value, "loss-fn": value, "collate-fn.overlong": overlong}
    if value == "pt":
        return loss | {"packing": theirs.get("packing") is not False}
    pictured = "auto" if _has_pictures(theirs) else "none"
    return {"prompt": "chat", "prompt-fn": "chat", "image-token": pictured} | loss


def _tuning(value: str, theirs: Theirs, row: Row) -> Ours:
    if value == "freeze":
        return {"freeze.layers": theirs.get("freeze_trainable_layers", 2)}
    if value == "full":
        return {}
    parts = {"parts.mlp.frozen": True} if _has_pictures(theirs) else {}
    if "lm_head" not in str(theirs.get("additional_target")):
        parts["parts.lm_head.frozen"] = True
    return {"llm-lora-num": 1, **parts}


def _tower(value: Any, theirs: Theirs, row: Row) -> Ours:
    if not _has_pictures(theirs) or not (value or _is_lora(theirs)):
        return {}
    return {"parts.vit.frozen": True} if value else {"vit-lora-num": 1}


def _pref_loss(value: str, theirs: Theirs, row: Row) -> Ours | str:
    more: dict[str, Ours] = {"sigmoid": {}, "hinge": {}, "ipo": {}}
    more["orpo"] = {"loss-fn.sft_weight": 1.0}
    more["simpo"] = {"loss-fn.margin": theirs.get("simpo_gamma", 0.5)}
    if theirs.get("stage") != "dpo":
        return {}
    if value not in more:
        return f"{value} is not here. Take stage kto, or a loss_type of docs/preference.md."
    return {"loss-fn.loss_type": value, **more[value]}


def _batch(value: int, theirs: Theirs, row: Row) -> Ours:
    step = value * theirs.get("gradient_accumulation_steps", 1) * theirs["cards"]
    return {"micro-batch-size": value, "batch-size": theirs.get("global_batch_size") or step}


def _deepspeed(value: Any, theirs: Theirs, row: Row) -> Ours | str:
    if "offload" in str(value):
        return "Host memory is `engine: streaming` here (docs/streaming.md): add it."
    if theirs["cards"] > 1:
        return {"num-stages": theirs["cards"]}
    if "z3" in str(value):
        return "Stages hold parts of the weights, as ZeRO-3 does: give --cards, or num-stages."
    return "Stages share weights and optimizer: give --cards; replicas are dp-degree and dp-shard."


def _steps(value: float, theirs: Theirs, row: Row) -> Ours | str:
    if row["to"] == "save-steps" and theirs.get("save_strategy", "steps") != "steps":
        return {}
    if 0 < float(value) < 1:
        return "A share of the run is not here. Give a number of steps, or epoch."
    return {row["to"]: int(value)} if float(value) >= 1 else {}


def _attention(value: Any, theirs: Theirs, row: Row) -> Ours | str:
    kernels = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa"}
    kernels |= dict.fromkeys(("fa2", "flash_attention_2"), "flash")
    kernel = kernels.get(str(value).lower())
    if kernel == "flash" and not any(theirs.get(one) for one in ("bf16", "fp16", "pure_bf16")):
        return "Flash attention computes in half precision alone. Add bf16: true."
    return {row["to"]: kernel} if kernel else f"{value} is not here. Take fa2, sdpa or disabled."


def _pixels(value: Any, theirs: Theirs, row: Row) -> Ours | str:
    if "qwen" in f"{theirs.get('template')} {theirs.get('model_name_or_path')}".lower():
        return {row["to"]: value}
    return "Only processors of Qwen-VL scale to pixels. Give images.max_tiles (docs/images.md)."


def _ftx(value: float, theirs: Theirs, row: Row) -> Ours | str:
    if theirs.get("stage") == "kto" and value:
        return "The loss kto has no term of the good answers' next tokens. Leave it out."
    return {row["to"]: value} if theirs.get("stage") == "dpo" else {}


def _for(*stages: str) -> Callable[[Any, Theirs, Row], Ours]:
    """Return an option of the losses of some stages."""
    return lambda value, theirs, row: {row["to"]: value} if theirs.get("stage") in stages else {}


def _if(said: Callable[[Any, Theirs], Any]) -> Callable[[Any, Theirs, Row], Ours]:
    """Return an option with the given value; None: leave it out."""

    def make(value: Any, theirs: Theirs, row: Row) -> Ours:
        got = said(value, theirs)
        return {} if got is None else {row["to"]: got}

    return make


def _is_constant(theirs: Theirs) -> bool:
    return theirs.get("lr_scheduler_type") == "constant"


def _warmup_steps(value: float) -> Ours:
    # a share of the run since transformers 5
    is_share = 0 < float(value) < 1
    return {"warmup-ratio": float(value)} if is_share else {"warmup-steps": int(float(value))}


def _pissa(value: bool, theirs: Theirs) -> str | None:
    rounds = theirs.get("pissa_iter", 16)
    return (f"pissa_niter_{rounds}" if rounds > 0 else "pissa") if value else None


def _rows(value: float, theirs: Theirs) -> int | float | None:
    return (float(value) if float(value) < 1 else int(value)) if value else None


BY: dict[str, Callable[[Any, Theirs, Row], Ours | str]] = {
    "nothing": lambda *_: {},
    "names": _if(lambda value, _: None if value == "all" else _names(value)),
    "numbers": _if(lambda value, _: [float(one) for one in _names(value)]),
    "stage": _stage,
    "tuning": _tuning,
    "tower": _tower,
    "projector": _if(
        lambda value, all: bool(value) if _has_pictures(all) and not _is_lora(all) else None
    ),
    "alpha": _if(
        lambda value, all: value or 2 * all.get("lora_rank", 8) if _is_lora(all) else None
    ),
    "pissa": _if(_pissa),
    "double": _if(lambda value, all: value if all.get("quantization_bit") == 4 else None),
    "pref_loss": _pref_loss,
    "ftx": _ftx,
    "of_dpo": _for("dpo"),
    "of_kto": _for("kto"),
    "of_dpo_kto": _for("dpo", "kto"),
    "packing": _if(lambda value, all: bool(value) if all.get("stage") != "pt" else None),
    "template": _if(
        lambda value, _: {"enable_thinking": False} if value.endswith("_nothink") else None
    ),
    "thinking": _if(lambda value, _: {"enable_thinking": bool(value)}),
    "share": _if(_rows),
    "attention": _attention,
    "pixels": _pixels,
    "batch": _batch,
    "betas": lambda value, all, row: {"optimizer.beta1": value[0], "optimizer.beta2": value[1]},
    "epochs": _if(lambda value, all: None if (all.get("max_steps") or 0) > 0 else float(value)),
    "steps": _steps,
    "warmup": _if(
        lambda value, all: None if all.get("warmup_steps") or _is_constant(all) else value
    ),
    "warmup_steps": lambda value, all, row: {} if _is_constant(all) else _warmup_steps(value),
    "must_be_true": lambda value, all, row: {} if value else row["why"],
    "temperature": _if(lambda value, all: None if all.get("do_sample") is False else value),
    "max_length": lambda value, all, row: {} if all.get("max_new_tokens") else row["why"],
    "tracked": _if(lambda value, all: value if _has_tracker(all) else None),
    "of_eval": _if(lambda value, all: None if all.get("do_train") else value),
    "gigabytes": _if(lambda value, _: f"{value}GB"),
    "tokens": _if(lambda _, all: [key for key in all if key.startswith("<")]),
    "deepspeed": _deepspeed,
    "one": lambda value, all, row: {} if value == 1 else row["why"],
}


def _has_tracker(theirs: Theirs) -> bool:
    return theirs.get("use_swanlab") or theirs.get("report_to", "none") not in (
        *("none", "tensorboard", ["none"]),
    )


# -- a file ----------------------------------------------------------------------------------------


ROWS = {
    key: (keys.split()[0], row)  # (the first of its names, its row)
    for section in TABLE.values()
    for keys, row in section.items()
    for key in keys.split()
}


def row_of(key: str) -> tuple[str, Row]:
    """Return (the first name of a key, its row of the table)."""
    patterns = (one for one in ROWS if "*" in one and fnmatch.fnmatchcase(key, one))
    found = key if key in ROWS else next(patterns, None)
    if found is None:
        return key, {"why": "It is not known here. Look for it in `stageline train --help all`."}
    name, row = ROWS[found]
    return (name if "to" in row and "*" not in name else key), row


def what_becomes(key: str, value: Any, theirs: Theirs) -> Ours | str:
    """Return Stageline's options, or why there are none and what to do."""
    row = row_of(key)[1]
    if "by" in row and (value is not None or "default" in row):
        return BY[row["by"]](value, theirs, row)
    if value is None or "drop" in row or ("why" in row and value in (False, [], "")):
        return {}
    if "words" not in row:
        return row["why"] if "why" in row else {row["to"]: value}
    words = {str(one).lower(): ours for one, ours in row["words"].items()}
    if str(value).lower() not in words:
        return f"{value} is not here. Known: {row.get('note') or ', '.join(words)}."
    ours = words[str(value).lower()]
    return ours if isinstance(ours, dict) else {} if ours is None else {row["to"]: ours}


def flat(theirs: Theirs, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of a file; keys of nested mappings are `outer.inner`."""
    for key, value in theirs.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def convert(given: Theirs, *, cards: int = 1, info: Path | None = None) -> Imported:
    """Convert the keys of a LLaMA-Factory file.

    Args:
        cards: that LLaMA-Factory's run used, and that the stages get.
        info: its dataset_info.json, or the file that `train_dataset` names; None: not there.
    """
    keys = dict(flat(given))
    theirs = {row_of(key)[0]: value for key, value in keys.items()} | {"cards": cards}
    made = Imported(_command(theirs))
    usual = "v1" if "model" in keys else "default"
    if made.command != "train":
        usual = "answers"
    elif "model_name_or_path" not in theirs:
        usual = "none"
    rest = {name: row[usual] for name, row in ROWS.values() if usual in row and name not in theirs}
    for key, value in keys.items():
        made.add(f"{key}: {_written(value)}", what_becomes(key, value, rest | theirs))
    for key, value in rest.items():
        got = what_becomes(key, value, rest | theirs)
        assert isinstance(got, dict), got  # a default of LLaMA-Factory's is here, too
        taken = _taken(got, made.command)
        new = {} if isinstance(taken, str) else taken
        new = {name: one for name, one in new.items() if name not in made.options}
        if new:
            made.add(f"{key}: {_written(value)} is what holds there without it", new)
    if made.command in ("train", "eval") and "model_name_or_path" in theirs:
        _add_parts(made, rest | theirs, info)
    return made


def _command(theirs: Theirs) -> str:
    if "export_dir" in theirs:
        return "export"
    if theirs.get("do_predict") and not theirs.get("do_train"):
        return "eval"
    is_model = "model_name_or_path" in theirs
    is_trained = not {"stage", "dataset", "train_dataset"}.isdisjoint(theirs)
    return "train" if is_trained or not is_model else "chat"


def _taken(got: Ours, command: str) -> Ours | str:
    """Return the options of a command or of none; a text if only other commands have them."""
    kept, takers = {}, []
    for option, value in got.items():
        head = option.partition(".")[0].replace("-", "_")
        takers = [name for name, taken in TAKEN_BY.items() if head in taken]
        if not takers or command in takers:
            kept[option] = value
    if got and not kept and command != "export":
        return f"{', '.join(got)} goes with stageline {' or '.join(takers)}. Give it there."
    return kept


def _add_parts(made: Imported, theirs: Theirs, info: Path | None) -> None:
    """Add what LLaMA-Factory finds out by itself: the kind of model, stages, data sets."""
    parts: Ours = {"builder": "auto", "model": "generate", "metric": "text"}
    if made.command == "train":
        kind = "vision_language" if _has_pictures(theirs) else "causal_lm"
        parts = {"train-model": "reward" if theirs["stage"] == "rm" else kind}
        parts |= {} if "num-stages" in made.options else {"num-stages": theirs["cards"]}
        is_held_out = theirs.get("eval_dataset") or theirs.get("val_size")
        parts |= {} if is_held_out else {"eval-samples": 0}
    made.add("the kind of model, as its name tells", parts)
    if theirs.get("model_revision", "main") != "main":
        made.options["model-path"] += f"@{theirs['model_revision']}"
    if READY_MADE.search(str(theirs["model_name_or_path"])):
        made.add(
            f"model_name_or_path: {theirs['model_name_or_path']}",
            "Weights that others quantised are not read. Take the model that they were made of, "
            "and quantization nf4.",
        )
    place = theirs.get("train_dataset") or f"{theirs.get('dataset_dir', 'data')}/{INFO}"
    made.add("the data sets", {"dataset": "sets", "dataset.info": str(info or place)})
    if info is None:
        made.add(place, "It was not found. Give it with --dataset-info, or write one.")
        return
    entries = _read(info)
    given = [theirs.get(key) or [] for key in ("dataset", "eval_dataset")]
    names = [name for one in given for name in _names(one)]
    if "train_dataset" in theirs:
        names = [*entries]
        made.add("all of its sets", {"dataset.names": names})
    for name in names:
        made.sets[name] = _entry(made, name, entries.get(name) or {}, info)
        if theirs["stage"] == "pt":
            columns = made.sets[name].get("columns", {})
            text = {"text": columns.get("prompt", "instruction")}
            made.sets[name] |= {"formatting": "text", "columns": text}


def _entry(made: Imported, name: str, entry: Theirs, info: Path) -> Ours:
    """Return an entry of Stageline's register of data sets; the rest of it is reported."""
    same = ("formatting", "ranking", "columns", "tags", "num_samples", "split")
    ours = {key: entry[key] for key in same if entry.get(key) is not None}
    file, hub = entry.get("file_name"), entry.get("hf_hub_url")
    if "path" in entry and entry.get("source") == "local":
        file = entry["path"]
    elif "path" in entry:
        hub = entry["path"]
    if file:  # `path` is relative to the folder of their program
        places = [folder / file for folder in (info.parent, *info.absolute().parents)]
        place = next((one for one in places if one.exists()), places[0])
        ours["file_name"] = str(place.absolute())
    elif hub:
        ours["file_name"] = f"hub:{hub}"
    else:
        made.add(f"the set {name}", "Its rows are in no file and not on the hub. Download them.")
    if entry.get("converter") == "pair":
        ours["ranking"] = True
    elif "converter" in entry:
        ours["formatting"] = entry["converter"]
    if "size" in entry:
        ours["num_samples"] = entry["size"]
    for key in ("subset", "folder", "weight"):
        if entry.get(key):
            made.add(f"the set {name}: {key}", "There is no such key. Name its files in file_name.")
    return ours


# -- what is written -------------------------------------------------------------------------------


def _written(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def config_text(made: Imported, *, source: str, output: str) -> str:
    """Return the config file: each key of LLaMA-Factory as a comment, and below it its options."""
    first = f"stageline {made.command} {output}"
    if made.command == "export":
        words = [word for name, value in made.options.items() for word in _option(name, value)]
        first = f"stageline export --merge {shlex.join(words)}"
    elif "model-path" not in made.options:
        first = f"stageline train JOB.yaml {output}"
    lines = [f"# {first}", f"# What {source} of LLaMA-Factory says here, key by key."]
    to_write = {} if made.command == "export" else dict(made.options)
    for key, got in made.keys:
        names = [name for name in got if name in to_write] if isinstance(got, dict) else []
        if isinstance(got, str):
            continue
        lines += ["", f"# {key}"] if names else [f"# {key}"]
        lines += [f"{name}: {_written(to_write.pop(name))}" for name in names]
    left = [f"#   {line.strip()}" for text in made.left() for line in text.splitlines()]
    return "\n".join([*lines, *(["", "# not mapped:", *left] if left else []), ""])


def _option(name: str, value: Any) -> list[str]:
    if value in (True, False):
        return [f"--{name}"] if value else []
    return [f"--{name}", ",".join(value) if isinstance(value, list) else str(value)]


def main() -> None:
    """Read the command line, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a YAML of LLaMA-Factory")
    parser.add_argument("--output", type=Path, help="a new file; default: stageline_FILE")
    parser.add_argument("--dataset-info", type=Path, help=f"default: {INFO} where FILE looks")
    parser.add_argument("--cards", type=int, default=1, help="that their run used (default: 1)")
    given = parser.parse_args()
    output = given.output or Path(f"stageline_{given.file.stem}.yaml")
    if output.exists():
        raise UserError(
            f"{output} is there already, and nothing is overwritten. Give another --output."
        )
    theirs = _read(given.file)
    made = convert(
        theirs, cards=given.cards, info=given.dataset_info or _info_of(given.file, theirs)
    )
    if made.sets:
        sets = output.with_suffix(".sets.json")
        sets.write_text(json.dumps(made.sets, indent=2, ensure_ascii=False) + "\n", "utf-8")
        made.options["dataset.info"] = str(sets)
    output.write_text(config_text(made, source=given.file.name, output=str(output)), "utf-8")
    print(f"{output}: {len(made.options)} options of {len(made.keys)} keys")
    if made.left():
        print("not mapped:", *(f"  {text}" for text in made.left()), sep="\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        theirs = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{file} cannot be read ({error}). Give the path of a YAML of LLaMA-Factory."
        ) from error
    if not isinstance(theirs, dict):
        raise UserError(
            f"{file} holds {type(theirs).__name__}, not keys and values such as `stage: sft`. Give "
            "a YAML of LLaMA-Factory."
        )
    return {str(key): value for key, value in theirs.items()}


def _info_of(file: Path, theirs: Theirs) -> Path | None:
    """Return the register of data sets of a file, in the working folder or above the file."""
    name = theirs.get("train_dataset") or f"{theirs.get('dataset_dir', 'data')}/{INFO}"
    places = [Path(folder, name) for folder in (Path(), *file.absolute().parents)]
    return next((place for place in places if place.is_file()), None)


if __name__ == "__main__":
    run_entry(main)
