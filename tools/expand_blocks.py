"""Add layers to a checkpoint that change nothing yet: LLaMA-Pro (Wu et al., arXiv 2401.02415).

`python tools/expand_blocks.py SmolLM2-135M SmolLM2-135M-pro --num-expand 6`.
After each group of layers comes a copy of its last one, whose output matrices are zero: it adds
zero to the hidden states, and the model computes what it did. If only the copies train
(`--freeze.llama_pro`), all that was there stays. File by file, without a model.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stageline.checkpoint.export_files import copy_side_files
from stageline.checkpoint.files import ADAPTER_CONFIG, find_checkpoint, weight_files
from stageline.distributed.failure import run_entry
from stageline.errors import UserError
from stageline.hub import local_folder
from stageline.model_folder import load_config
from tools.weight_files import new_folder, rewrite_weights

# last matrices of attention and of the feed-forward part, by the names that families give them
OUTPUTS = ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "fc2", "w2", "wo")
_TOWERS = ("vision", "visual", "vit")
_INDICES = ("mlp_only_layers", "cross_attention_layers")
_LAYER = re.compile(r"^(?P<list>.+?)\.(?P<index>\d+)\.(?P<rest>.+)$")
Places = list[tuple[int, bool]]  # for each new layer the old one, and whether it is a copy


def expand_blocks(source: str | Path, target: str | Path, *, num_expand: int) -> Path:
    """Write a model folder with `num_expand` more layers, one behind each group of equal size.

    Raises:
        UserError: the layers are no such groups, the target exists, or the names of the layers
            or of their output matrices are not known.
    """
    folder, target = find_checkpoint(source), Path(target).expanduser().absolute()
    if (folder / ADAPTER_CONFIG).exists():
        raise UserError(
            f"{folder} is an adapter, which has no layers to copy. Merge it first (export.sh "
            "--merge)."
        )
    config = load_config(folder, keeps_bits=True)
    total = config.get_text_config(decoder=True).num_hidden_layers
    places = places_of(total, num_expand)
    files = weight_files(folder)
    path = find_list(list(files), total)
    expand_config(config, places)
    with new_folder(target) as draft:
        _write_weights(files, path, places, draft)
        copy_side_files(folder, draft, with_code=False)
        config.save_pretrained(draft)
        if (folder / GENERATION_CONFIG_NAME).is_file():  # it has the tokens that end an answer
            shutil.copyfile(folder / GENERATION_CONFIG_NAME, draft / GENERATION_CONFIG_NAME)
    return target


def places_of(total: int, num_expand: int) -> Places:
    """Return the old layer of each new one, and whether it is a copy."""
    if num_expand < 1 or total % num_expand:
        raise UserError(
            f"--num-expand {num_expand} does not divide the {total} layers of the model into equal "
            f"groups, after each of which a layer is added. Choose a number that divides {total}."
        )
    stride = total // num_expand
    places = []
    for index in range(total):
        places.append((index, False))
        if (index + 1) % stride == 0:
            places.append((index, True))
    return places


def find_list(names: list[str], total: int) -> str:
    """Return the path of the decoder's layers in the names of a checkpoint."""
    indices: dict[str, set[int]] = {}
    for name in names:
        match = _LAYER.match(name)
        if match and not any(word in match["list"] for word in _TOWERS):
            indices.setdefault(match["list"], set()).add(int(match["index"]))
    found = [path for path, numbers in indices.items() if numbers == set(range(total))]
    if len(found) != 1:
        raise UserError(
            f"the checkpoint has {len(found)} lists of {total} layers in the names of its weights "
            f"({', '.join(found) or 'none'}), so it is unclear which layers to copy. This "
            "architecture cannot be expanded here."
        )
    return found[0]


def expand_config(config: PretrainedConfig, places: Places) -> None:
    """Write the new layers into a configuration, in place."""
    text: Any = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    for name in ("decoder_sparse_step", "interleave_moe_layer_step"):
        if getattr(text, name, 1) not in (None, 1):
            raise UserError(
                f"config.json has {name} {getattr(text, name)}, not 1: only some layers have "
                "experts, and copies would change which. This model cannot be expanded."
            )
    changed: dict[str, object] = {}
    for name, value in list(vars(text).items()):
        if not isinstance(value, list | tuple) or "layer" not in name:
            continue
        if name in _INDICES:
            changed[name] = [new for new, (old, _) in enumerate(places) if old in value]
        elif len(value) == total:  # an entry a layer
            changed[name] = [value[old] for old, _ in places]
    first_dense = getattr(text, "first_k_dense_replace", None)
    if first_dense:
        changed["first_k_dense_replace"] = sum(old < first_dense for old, _ in places)
    # together: the number and the lists are compared when one of them is set
    vars(text).update({**changed, "num_hidden_layers": len(places)})
    for name in getattr(text, "attribute_map", {}):
        if text.attribute_map[name] == "num_hidden_layers":
            vars(text).pop(name, None)
    real = getattr(text, "attribute_map", {}).get("num_hidden_layers")
    if real:
        vars(text).pop("num_hidden_layers")
        vars(text)[real] = len(places)


def _write_weights(files: dict[str, Path], path: str, places: Places, draft: Path) -> None:
    zeroed: dict[int, set[str]] = {new: set() for new, (_, is_copy) in enumerate(places) if is_copy}
    rewrite_weights(
        files, draft, lambda name, value: _new_tensors(name, value, path, places, zeroed)
    )
    # attention and feed-forward part: each has an output of its own
    poor = [new for new, parents in zeroed.items() if len(parents) < 2]
    if poor:
        raise UserError(
            f"layer {poor[0]} has outputs with a known name ({', '.join(OUTPUTS)}) only in "
            f"{sorted(zeroed[poor[0]])}, but a copy changes nothing only if the outputs of "
            "attention and of the feed-forward part are zero. This architecture cannot be expanded."
        )


def _new_tensors(
    name: str, value: torch.Tensor, path: str, places: Places, zeroed: dict[int, set[str]]
) -> dict[str, torch.Tensor]:
    match = _LAYER.match(name)
    if not match or match["list"] != path:
        return {name: value}
    made, rest = {}, match["rest"]
    is_output = any(part.removesuffix("_bias") in OUTPUTS for part in rest.split("."))
    for new, (old, is_copy) in enumerate(places):
        if old != int(match["index"]):
            continue
        if is_copy and is_output:
            zeroed[new].add(rest.partition(".")[0])
        # files hold no two names of one memory
        copy = torch.zeros_like(value) if is_output else value.clone()
        made[f"{path}.{new}.{rest}"] = copy if is_copy else value
    return made


def main() -> None:
    """Read the command line, and expand."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("old", type=Path, help="a model folder or hub name")
    parser.add_argument("new", type=Path, help="a new folder")
    parser.add_argument(
        "--num-expand", type=int, required=True, help="layers to add; it divides those there are"
    )
    options = parser.parse_args()
    old = local_folder(options.old, option="OLD")
    made = expand_blocks(old, options.new, num_expand=options.num_expand)
    print(
        f"expanded {options.old} to {made}; train only its new layers with "
        f"--freeze.llama_pro --freeze.layers {options.num_expand}"
    )


if __name__ == "__main__":
    run_entry(main)
