"""Peak memory that the planner predicts against what a rank really holds, on one device.

Each rank of a pipeline is played alone: its stages, its order of passes with random inputs and
gradients, its float32 masters, and AdamW's update; two steps, so that all state is there. On a GPU
torch's allocator tells the peak, on a CPU every operation is watched. Not measured: buffers of
transfers, and what NCCL takes.
Usage: plan_memory.py [MODEL_FOLDER] [--num-ranks 4] [--tokens 512] [--bf16] [--device cuda]
"""

import argparse
import contextlib
import gc
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_lora, materialise, run_init
from stageline.modules.lora import unwrapped
from stageline.pipeline.live_bytes import PeakBytes
from stageline.pipeline.plan import Kind, drop_dead_backward, grad_flow
from stageline.pipeline.runner import LocalStages
from stageline.pipeline.schedules import make_schedule
from stageline.pipeline.stage_passes import StagePasses
from stageline.planner.planner import Planner
from stageline.training.precision import MasterWeights

NUM_MICRO_BATCHES = 8
WAYS = {
    "full": {},
    "lora": {"llm_lora_num": 1, "lora_rank": 16, "frozen_lm_head": True},
    "full, recomputed": {"gradient_checkpointing": True},
}
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")


def small_config():
    return AutoConfig.for_model(
        "llama",
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=8,
        vocab_size=4096,
        tie_word_embeddings=False,
    )


def loss_of(output, batch):
    return sft(output, batch, num_targets=torch.ones((), device=output.device))


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters.values(), lr=1e-5) if parameters else None


def play_rank(make, schedule, rank, partition, batch, device):
    """The most bytes that a rank holds in two steps beyond what the process had before."""
    meter = PeakBytes(device)
    with meter.watch():
        batch = {name: value.to(device) for name, value in batch.items()}
        models = [
            make(stage=stage, num_stages=schedule.num_stages, partition=partition, device=device)
            for stage in schedule.stages_of(rank)
        ]
        trained = LocalStages(models).named_parameters()
        weights = MasterWeights({n: p for n, p in trained.items() if p.requires_grad})
        optimizer = make_optimizer(weights.parameters)
        trains = [True] * schedule.num_stages  # an adapter or a weight in every stage
        flow = grad_flow(trains)
        passes = {
            model.stage: StagePasses(
                model,
                computes_grad=flow.computes[model.stage],
                sends_grad=flow.sends[model.stage],
                saving=torch.enable_grad,
            )
            for model in models
        }
        order = drop_dead_backward(schedule.orders(NUM_MICRO_BATCHES), flow)[rank]
        for _ in range(2):
            weights.zero_grad()
            for action in order:
                play(passes[action.stage], action, batch, device)
            if optimizer is not None:
                optimizer.step()
                weights.write_back()
    del models, trained, weights, optimizer, passes, batch
    gc.collect()
    return meter.peak


def play(passes, action, batch, device):
    """One pass, with random tensors in place of those of other ranks."""
    model, shape = passes.model, tuple(batch["input_ids"].shape)

    def filled(metas):
        return tuple(torch.randn(m.shape, dtype=m.dtype, device=device) for m in metas)

    if action.kind == Kind.FORWARD:
        first = (batch["input_ids"],)
        came = first if model.is_first else filled(model.get_example_input(*shape))
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        loss = (lambda output: loss_of(output, batch)) if model.is_last else None
        passes.forward(action.micro_batch, came, inputs, loss_of=loss)
        return
    has_grads = not model.is_last and action.kind != Kind.WEIGHT_GRAD
    grads = filled(model.get_example_output(*shape)) if has_grads else None
    passes.backward(action.micro_batch, action.kind, grads)


def draw(stage, *, device: torch.device, dtype: torch.dtype) -> None:
    """Fill a stage that is on meta with random weights, which the device draws itself.

    A host takes minutes for 8 billion; `init_split_model` draws there, for equal weights.
    """
    materialise(stage, device=device, dtype=dtype)
    with unwrapped(stage):
        run_init(stage, seed=0, device=device)
    init_lora(stage, seed=0)


@contextlib.contextmanager
def pieces_of(config, options, dtype):
    """What makes stages of a configuration, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)

        def make(*, device, **kwargs):
            kwargs |= {"config_path": folder, "processor_path": None, "checkpoint_path": None}
            kwargs |= {"is_piece": True, "dtype": dtype, "device": "meta"}
            stage = CausalLMStage.build(**{**options, "methods": None}, **kwargs)[0]
            if torch.device(device).type != "meta":
                draw(stage, device=torch.device(device), dtype=dtype)
            if methods := options.get("methods"):  # of what was drawn
                stage.methods = methods
                methods.quantise(stage, device=device)
                stage.frozen()
            return stage

        yield make


def expected(make, schedule, batch, *, device, make_optimizer, num_micro_batches):
    """What the planner expects of steps of so many micro-batches like this one."""
    rows = len(batch["input_ids"])
    planner = Planner(
        make,
        schedule,
        num_samples=rows * num_micro_batches,
        micro_batch_size=rows,
        micro_batch_of=lambda rows: batch,
        loss_for=lambda model: loss_of,
        make_optimizer=make_optimizer,
        device=device,
        repeats=1,
    )
    placement = planner._placement(planner.measured(rows), None)
    return placement.expect(planner._partition("uniform", placement))


def compare(config, name, options, *, num_ranks, tokens, dtype, device, schedules=SCHEDULES):
    """A line of figures for each schedule."""
    ids = torch.randint(9, config.vocab_size, (1, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    given = {"make_optimizer": make_optimizer, "num_micro_batches": NUM_MICRO_BATCHES}
    with pieces_of(config, options, dtype) as make:
        for key in schedules:
            schedule = make_schedule(key, num_ranks=num_ranks)
            expectation = expected(make, schedule, batch, device=device, **given)
            predicted = [rank.peak - rank.inputs for rank in expectation.memory]
            found = [
                play_rank(make, schedule, rank, expectation.partition, batch, device)
                for rank in range(num_ranks)
            ]
            ratios = [round(p / f, 3) for p, f in zip(predicted, found, strict=True)]
            figures = {"training": name, "schedule": key, "predicted_to_measured": ratios}
            figures["measured_mib"] = [round(value / 2**20, 1) for value in found]
            yield figures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="folder with config.json; default: a small one")
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        arguments.device = "cuda:0"
    config = AutoConfig.from_pretrained(arguments.model) if arguments.model else small_config()
    for name, options in WAYS.items():
        for figures in compare(
            config,
            name,
            options,
            num_ranks=arguments.num_ranks,
            tokens=arguments.tokens,
            dtype=torch.bfloat16 if arguments.bf16 else torch.float32,
            device=torch.device(arguments.device),
        ):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
