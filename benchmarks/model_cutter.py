"""The device_map by bytes against the one by number of layers, and stated bytes against real ones.

`maps`: known models on the meta device over machines that people have; the largest used fraction of
a device under the map by number, the library's balanced "auto" map (by weights), and ours.
`real`: a model with SmolLM2's shape on the CPU: weights, cache and the fullest moment of a true
generation against what is stated. Figures: benchmarks/model_cutter_DATE.md.
Usage: model_cutter.py maps|real
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes, get_balanced_memory

from stageline.inference.model_cutter import (
    HEADROOM,
    ModelCutter,
    device_bytes,
    format_table,
)
from stageline.pipeline.live_bytes import PeakBytes
from stageline.planner.estimate import (
    Load,
    layer_tensors,
    layers_path,
    measure_model,
    model_on_meta,
)

GIB = 1024**3
MACHINES = {
    "24 + 48 GiB": (24, 48),
    "8 x 24 GiB": (24,) * 8,
    "2 x 80 GiB": (80, 80),
    "4 x 48 GiB": (48,) * 4,
    "8 x 12 GiB": (12,) * 8,
}
TEXT_LOAD, SEEING_LOAD = Load(8, 4096), Load(4, 4096, images=12)


def llama(hidden, inner, layers, heads):
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
    )


def qwen2_5_vl():
    """Qwen2.5-VL-7B."""
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    vision = {"hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "num_heads": 16}
    vision["out_hidden_size"] = 3584
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)


def internvl():
    """InternVL3-8B: InternViT-300M and Qwen2.5-7B."""
    text = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 151674,
    }
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    vision |= {"num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14]}
    return transformers.InternVLConfig(text_config=text, vision_config=vision)


def internvl_26b():
    """InternVL2-26B: a tower of six billion parameters, and InternLM2-20B."""
    text = {
        "model_type": "llama",
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "vocab_size": 92553,
    }
    vision = {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45}
    vision |= {"num_attention_heads": 25, "image_size": [448, 448], "patch_size": [14, 14]}
    return transformers.InternVLConfig(text_config=text, vision_config=vision)


def mixtral():
    """Mixtral-8x7B."""
    return transformers.MixtralConfig(num_key_value_heads=8, sliding_window=None)


def gemma3():
    """Gemma-3-27B: five of six layers have a window."""
    text = {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "vocab_size": 262208,
    }
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    vision |= {"num_attention_heads": 16, "image_size": 896, "patch_size": 14}
    return transformers.Gemma3Config(text_config=text, vision_config=vision)


MODELS = {
    "Llama-3-8B": (lambda: llama(4096, 14336, 32, 32), TEXT_LOAD),
    "Llama-3-70B": (lambda: llama(8192, 28672, 80, 64), TEXT_LOAD),
    "Mixtral-8x7B": (mixtral, TEXT_LOAD),
    "Qwen2.5-VL-7B": (qwen2_5_vl, SEEING_LOAD),
    "InternVL3-8B": (internvl, SEEING_LOAD),
    "InternVL2-26B": (internvl_26b, Load(1, 4096, images=12)),
    "Gemma-3-27B": (gemma3, SEEING_LOAD),
}


def largest(found):
    fraction = max(item.fraction for item in found)
    return f"{fraction:.1%}" + (" (does not fit)" if fraction > 1 - HEADROOM else "")


def auto_map(model, bytes_of, memory):
    """The library's balanced map by weights: its layers, head and norm where it puts them."""
    limits = dict(enumerate(memory))
    balanced = get_balanced_memory(
        model, limits, no_split_module_classes=model._no_split_modules, dtype=model.dtype
    )
    placed = infer_auto_device_map(
        model, balanced, no_split_module_classes=model._no_split_modules, dtype=model.dtype
    )
    if any(not isinstance(home, int) for home in placed.values()):
        return None
    lasting = [0] * len(memory)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        lasting[_home(name, placed)] += tensor.nbytes
    path = layers_path(model)
    peaks = [0] * len(memory)
    for index, layer in enumerate(bytes_of.layers):
        home = _home(f"{path}.{index}.x", placed)
        lasting[home] += layer.cache + layer.beyond
        peaks[home] = max(peaks[home], layer.answering)
    peaks[0] = max(peaks[0], bytes_of.tower.answering)
    return max((a + b) / c for a, b, c in zip(lasting, peaks, memory, strict=True))


def _home(name, placed):
    keys = [key for key in placed if not key or name == key or name.startswith(f"{key}.")]
    return placed[max(keys, key=len)] if keys else 0


def maps():
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # none of these devices is here
    print("| model, bfloat16 | load | machine | weights | cache | by number | auto | by bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (make, load) in MODELS.items():
        model = model_on_meta(make(), dtype=torch.bfloat16)
        bytes_of = measure_model(model, load)
        assert bytes_of.weights == compute_module_sizes(model)[""], name
        for machine, sizes in MACHINES.items():
            memory = [size * GIB for size in sizes]
            options = {"num_devices": len(memory), "memory": memory, "load": load}
            old = ModelCutter(model, visual_gpu_ratio=0.0, **options)
            new = ModelCutter(model, **options)
            by_number = device_bytes(bytes_of, old.homes, memory)
            by_bytes = new.devices()
            auto = auto_map(model, bytes_of, memory)
            shown = "to CPU or disk" if auto is None else f"{auto:.1%}"
            cache = sum(layer.cache for layer in bytes_of.layers) / GIB
            print(
                f"| {name} | {load} | {machine} | {bytes_of.weights / GIB:.1f} | {cache:.1f} | "
                f"{largest(by_number)} | {shown} | {largest(by_bytes)} |",
                flush=True,
            )
        if name == "InternVL3-8B":
            memory = [24 * GIB, 48 * GIB]
            cutter = ModelCutter(model, num_devices=2, memory=memory, load=load)
            example = format_table(cutter.devices())
    print(f"\nInternVL3-8B on 24 + 48 GiB:\n{example}")


def real():
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    print("| rows | tokens | weights: stated / real | cache: stated / real | peak: stated / real |")
    print("|---|---|---|---|---|")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = sum(p.nbytes for p in [*model.parameters(), *model.buffers()])
    for rows, length in ((1, 256), (4, 256), (8, 128), (4, 768)):
        stated = measure_model(model_on_meta(config, dtype=torch.float32), Load(rows, length))
        found = device_bytes(stated, [0] * 30, [GIB])[0]
        ids_BT = torch.randint(9, 49152, (rows, length - 4))
        mask_BT = torch.ones_like(ids_BT)
        mask_BT[0, : rows - 1] = 0
        watch = PeakBytes(torch.device("cpu"))
        with watch.watch():
            made = model.generate(
                ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                pad_token_id=0,
            )
        cache = sum(t.nbytes for layer in made.past_key_values.layers for t in layer_tensors(layer))
        expected = found.cost.cache + found.workspace
        print(
            f"| {rows} | {length} | {stated.weights:,} / {weights:,} "
            f"| {found.cost.cache:,} / {cache:,} "
            f"| {expected:,} / {watch.peak:,} = {expected / watch.peak:.2f} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("maps", "real"))
    start = time.perf_counter()
    {"maps": maps, "real": real}[parser.parse_args().what]()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
