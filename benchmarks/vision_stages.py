"""Peak memory of each rank for the ways to place a vision tower that is larger than its decoder.

Each of two ranks is played alone: its stages, its order of passes with random tensors in place of
those of other ranks, and AdamW; two steps, so that all state is there. On a GPU torch's allocator
tells the peak, on a CPU every operation is watched. Not measured: time, buffers of transfers.
Usage: vision_stages.py [--device cuda] [--tower-layers 24]
"""

import argparse
import gc
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from loss_fn import sft
from pp_models import VisionLanguageStage
from stageline.pipeline.live_bytes import PeakBytes
from stageline.pipeline.plan import Kind, drop_dead_backward, grad_flow
from stageline.pipeline.schedules import make_schedule
from stageline.pipeline.stage_passes import StagePasses, batch_input, batch_output, model_inputs

NUM_MICRO_BATCHES, NUM_RANKS, NUM_TILES, IMAGE_TOKEN = 8, 2, 4, 5
# what is typed -> schedule, options of the stages
WAYS = {
    "--num-stages 2": ("1f1b", {}),
    "--num-stages 2 --partition 1,3": ("1f1b", {"partition": [1, 3]}),
    "--num-stages 2 --vision-stages 1": ("1f1b", {"vision_stages": 1}),
    "--num-stages 4 --vision-stages 2 --schedule interleaved_1f1b": (
        "interleaved_1f1b",
        {"vision_stages": 2},
    ),
}


def make_config(tower_layers: int) -> transformers.InternVLConfig:
    """A tower of `tower_layers` before a decoder of 4, of one width."""
    shared = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}
    vision = {**shared, "num_hidden_layers": tower_layers, "image_size": [112, 112]}
    text = {**shared, "num_hidden_layers": 4, "num_key_value_heads": 8, "vocab_size": 1024}
    return transformers.InternVLConfig(
        vision_config={**vision, "patch_size": [14, 14]},
        text_config={"model_type": "qwen2", **text},
        image_token_id=IMAGE_TOKEN,
        image_seq_length=16,
    )


def make_batch(device: torch.device) -> dict[str, torch.Tensor]:
    """One row with all tiles and as many tokens of text."""
    num_image_tokens = NUM_TILES * 16
    ids = torch.randint(9, 1024, (1, 2 * num_image_tokens), device=device)
    ids[:, :num_image_tokens] = IMAGE_TOKEN
    labels = ids.where(ids != IMAGE_TOKEN, -100)
    pixels = torch.randn(NUM_TILES, 3, 112, 112, device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return {**batch, "pixel_values": pixels}


def play_rank(folder: str, rank: int, way: str, device: torch.device) -> int:
    """The most bytes that a rank holds in two steps."""
    key, options = WAYS[way]
    schedule = make_schedule(key, num_ranks=NUM_RANKS)
    flow = grad_flow([True] * schedule.num_stages)
    meter = PeakBytes(device)
    with meter.watch():
        passes, weights = {}, []
        for stage in schedule.stages_of(rank):
            model, _, _ = VisionLanguageStage.build(
                config_path=folder, processor_path=None, checkpoint_path=None, is_piece=True,
                stage=stage, num_stages=schedule.num_stages, device=device, **options,
            )  # fmt: skip
            weights += [parameter for parameter in model.parameters() if parameter.requires_grad]
            grads = {"computes_grad": flow.computes[stage], "sends_grad": flow.sends[stage]}
            passes[stage] = StagePasses(model, **grads, saving=nullcontext)
        optimizer, batch = torch.optim.AdamW(weights, foreach=False), make_batch(device)
        order = drop_dead_backward(schedule.orders(NUM_MICRO_BATCHES), flow)[rank]
        for _ in range(2):
            for action in order:
                play(passes[action.stage], action, batch)
            optimizer.step()
            optimizer.zero_grad()
    del passes, weights, optimizer, batch, model
    gc.collect()
    return meter.peak


def play(passes: StagePasses, action: object, batch: dict[str, torch.Tensor]) -> None:
    """One pass, with random tensors in place of those of other stages."""
    model, device = passes.model, batch["input_ids"].device

    def filled(metas: object) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(m.shape, dtype=m.dtype, device=device) for m in metas)

    if action.kind == Kind.FORWARD:
        own = model_inputs(batch)
        if model.stage > 0:
            own = {name: value for name, value in own.items() if name != "pixel_values"}
        came = (batch["input_ids"],) if model.stage == 0 else filled(batch_input(model, own))
        targets = torch.tensor(1.0, device=device)
        loss = (lambda output: sft(output, batch, num_targets=targets)) if model.is_last else None
        passes.forward(action.micro_batch, came, own, loss_of=loss)
    else:
        grads = None if model.is_last else filled(batch_output(model, batch))
        passes.backward(action.micro_batch, action.kind, grads)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tower-layers", type=int, default=12)
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if arguments.device == "cuda" else arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        make_config(arguments.tower_layers).save_pretrained(folder)
        for way in WAYS:
            torch.manual_seed(0)
            peaks = [play_rank(folder, rank, way, device) for rank in range(NUM_RANKS)]
            figures = {"way": way, "peak_mib": [round(peak / 2**20, 1) for peak in peaks]}
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
