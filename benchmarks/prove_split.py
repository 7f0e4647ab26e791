"""What the proof at the start of a run costs, and the rehearsal at the model's true width.

Each case is a process of its own, one thread: imports are not counted, peak memory is what the
process held above what it held before. `cold` makes the proof, `cached` finds its record; `plan`
builds the first stage of two on meta, which rehearses the whole model without weights; `stage`
builds the second one, whose plan is known. Widths of the models are the published ones.
Figures: benchmarks/prove_split.md.
Usage: prove_split.py [CASE ...]
"""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROPE = {"rope_type": "default"}
QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
# case -> (model_type, fields, key of the train_model part)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "digits": ("", {}, "internvl"),
    "granite": ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}, "causal_lm"),
    "Llama-3-8B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rope_parameters": {**ROPE, "rope_theta": 500000.0},
        },
        "causal_lm",
    ),
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        {
            "text_config": {
                **QWEN_7B,
                "vocab_size": 152064,
                "rope_parameters": {
                    **ROPE,
                    "rope_theta": 1e6,
                    "mrope_section": [16, 24, 24],
                },
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "window_size": 112,
                "patch_size": 14,
            },
        },
        "qwen2_5_vl",
    ),
    "InternVL3-8B": (
        "internvl",
        {
            "text_config": {
                "model_type": "qwen2",
                **QWEN_7B,
                "vocab_size": 151674,
                "rope_parameters": {**ROPE, "rope_theta": 1e6},
            },
            "vision_config": {
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
                "image_size": [448, 448],
                "patch_size": [14, 14],
            },
            "image_token_id": 151667,
        },
        "internvl",
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "rope_parameters": {**ROPE, "rope_theta": 1e6},
        },
        "qwen3_moe",
    ),
}


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    if names[0] == "--case":
        print(json.dumps(measure(names[1])), flush=True)
        return
    print("| model | proof, cold | proof, cached | plan at true width | stage | memory |")
    print("|---|---|---|---|---|---|")
    for name in names:
        made = subprocess.run(
            [sys.executable, __file__, "--case", name],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if made.returncode:
            sys.exit(made.stderr)
        told = json.loads(made.stdout.splitlines()[-1])
        seconds = [f"{told[part]:.2f} s" for part in ("cold", "cached", "plan", "stage")]
        print(f"| {name} | {' | '.join(seconds)} | {told['gib']:.2f} GiB |", flush=True)
    print(f"\n{platform.processor() or platform.machine()}, one thread")


def measure(name: str) -> dict[str, float]:
    """Seconds of one case, and the memory that its plan took."""
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers

    from register import import_shelf, train_model_register
    from stageline.distributed.ranks import Ranks
    from stageline.verify.scaled_copy import ScaledCopy, verify
    from stageline.verify.training import training

    transformers.logging.set_verbosity_error()
    import_shelf("pp_models")
    part = train_model_register[CASES[name][2]]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STAGELINE_CACHE"] = f"{folder}/cache"
        model = save_config(name, Path(folder, "model"))
        said: list[str] = []

        def prove() -> None:
            split = ScaledCopy(part, model, 2)
            verify(
                split,
                {"loss and gradients": training},
                mode="auto",
                ranks=Ranks.of(None),
                say=said.append,
            )

        def build(stage: int) -> None:
            part(
                config_path=model,
                processor_path=None,
                checkpoint_path=None,
                stage=stage,
                num_stages=2,
                dtype=torch.bfloat16,
                device="meta",
                is_piece=True,
            )

        found = {"cold": timed(prove), "cached": timed(prove)}
        assert len(said) == 1 and "equals" in said[0], said
        before = peak()
        found |= {"plan": timed(lambda: build(0)), "stage": timed(lambda: build(1))}
    return {**found, "gib": (peak() - before) / 2**20}


def save_config(name: str, folder: Path) -> str:
    """The model's config.json; of the digits job as its script makes it."""
    from transformers import CONFIG_MAPPING

    model_type, fields, _ = CASES[name]
    if not model_type:
        script = ROOT / "scripts" / "make_digits_model.py"
        subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
        return str(folder)
    CONFIG_MAPPING[model_type](**fields).save_pretrained(folder)
    return str(folder)


def timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def peak() -> int:
    """KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
