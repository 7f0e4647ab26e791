"""Writes benchmarks/adapter_fields.md: fields of peft's LoraConfig and what is done with them.

python benchmarks/adapter_fields.py
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import peft

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stageline.checkpoint.adapter import HARMLESS_FIELDS, PLAIN_STARTS, read_adapter_config
from stageline.errors import CheckpointError

PAGE = Path(__file__).with_suffix(".md")
USED = {
    "peft_type": "must be LORA",
    "task_type": "SEQ_CLS: the adapter belongs to a reward model",
    "base_model_name_or_path": "where the base is found",
    "revision": "revision of the base on a hub",
    "lora_alpha": "scale = alpha / r, r being the rows of lora_A in the file",
    "alpha_pattern": "alpha of single layers, the first pattern that matches",
    "use_rslora": "scale = alpha / sqrt(r)",
    "use_dora": "DoRA, whose magnitudes are in the file",
    "modules_to_save": "whole modules, whose weights are in the file",
    "trainable_token_indices": "ids of the rows in the file",
    "target_parameters": "weights of experts with LoRA",
}
WITHOUT_EFFECT = {
    "r": "the file has the rank of each layer; of experts, rank = r",
    "rank_pattern": "as r",
    "target_modules": "the file has the layers",
    "exclude_modules": "the file has the layers",
    "layers_to_transform": "the file has the layers",
    "layers_pattern": "the file has the layers",
    "fan_in_fan_out": "the layer's class tells it",
    "ensure_weight_tying": "the file has the weights of both tied modules",
    "lora_dropout": "training only; a run has its own",
    "inference_mode": "training only",
    "auto_mapping": "a class name that peft looks up",
    "peft_version": "who wrote the file",
    "runtime_config": "never saved; peft ignores it",
    "eva_config": "start of training only",
    "loftq_config": "used with init_lora_weights loftq, which is refused",
    "corda_config": "used with init_lora_weights corda, which is refused",
    "lora_ga_config": "used with init_lora_weights lora_ga, which is refused",
    "qalora_group_size": "used with use_qalora, which is refused",
    "megatron_core": "used with megatron_config, which is refused",
}
REFUSED = {
    "init_lora_weights": "pissa, olora, corda, loftq, lora_ga, unknown ones: they change the base; "
    f"plain are {', '.join(PLAIN_STARTS)}",
    "bias": "trained biases",
    "lora_bias": "a bias of lora_B",
    "layer_replication": "more layers than the base has",
    "megatron_config": "layers of Megatron",
    "use_qalora": "pooled inputs",
    "use_bdlora": "block-diagonal A or B",
    "velora_config": "another backward pass",
    "kasa_config": "a truncated base and singular values between A and B",
    "monteclora_config": "sampled weights",
    "alora_invocation_tokens": "applies from an invocation on only",
    "arrow_config": "routing between adapters",
}
HEAD = """# Adapters: every field of peft's LoraConfig

What Stageline does with an `adapter_config.json` of peft {version}, field by field. Outputs are
those of `PeftModel.from_pretrained`, or the adapter is refused and the field is named. A field of a
newer peft, which is not in this table, is refused unless it is at its default (that of the
installed peft, or empty). The table is made by `python benchmarks/adapter_fields.py`;
`tests/unit/test_adapter.py` compares it with the installed peft, and outputs with those of peft.

| field | default | Stageline | remark |
|---|---|---|---|
"""


def outcome(name: str, default: object) -> str:
    """What reading an adapter does with a field that is set, found by trying."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"peft_type": "LORA", name: "some" if default in (None, False) else "other"}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        try:
            read_adapter_config(Path(folder))
        except CheckpointError:
            return "used" if name == "peft_type" else "refused"
    return "used" if name in USED else "without effect"


def make_page() -> str:
    """Return the page; a field of the installed peft without a remark raises KeyError."""
    remarks = USED | WITHOUT_EFFECT | REFUSED
    assert USED.keys() | WITHOUT_EFFECT.keys() == HARMLESS_FIELDS | {"peft_type"}
    rows = []
    for field in dataclasses.fields(peft.LoraConfig):
        is_plain = field.default is not dataclasses.MISSING
        default = field.default if is_plain else None
        shown = f"`{default}`" if is_plain else "empty"
        did = outcome(field.name, default)
        rows.append(f"| `{field.name}` | {shown} | {did} | {remarks[field.name]} |")
    return HEAD.format(version=peft.__version__) + "\n".join(sorted(rows)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
