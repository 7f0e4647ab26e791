"""A training loop of your own: any model of transformers in two stages, on a schedule of torch.

    torchrun --nproc-per-node 2 examples/own_loop.py MODEL_FOLDER OUTPUT_FOLDER [Schedule1F1B]

`stageline train` adds data, clipping, logs, resume and evaluation (docs/from_python.md).
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.nn.functional import cross_entropy

from stageline import CausalLMStage, Ownership, save_split_model
from stageline.pipeline import StagelineStage, step_micro_batches


def micro_batches(step):
    """Yield two rows each, of their own length; every rank makes the same."""
    generator = torch.Generator().manual_seed(step)
    for length in torch.randint(4, 12, (4,), generator=generator).tolist():
        ids = torch.randint(3, 50, (2, length), generator=generator)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def main(folder, output, schedule_name="Schedule1F1B"):
    has_gpus = torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if has_gpus else "gloo")
    place = {"stage": dist.get_rank(), "num_stages": dist.get_world_size()}
    device = torch.device("cuda", place["stage"]) if has_gpus else torch.device("cpu")
    model, tokenizer, _ = CausalLMStage.build(
        config_path=None, processor_path=None, checkpoint_path=folder, device=device, **place
    )
    parameters = dict(model.train().named_parameters())
    ownership = Ownership(parameters, order=model.parameter_order)
    stages = StagelineStage.of([model], device)
    num_targets = 0  # the step sets it

    def loss_fn(logits, batch):  # a micro-batch's share of the mean over all tokens of the step
        labels = batch["labels"][:, 1:].flatten().to(device)
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum") / num_targets

    schedule_class = getattr(schedules, schedule_name)
    schedule = schedule_class(stages[0], 4, loss_fn=loss_fn, scale_grads=False)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    for step in range(3):
        batches, losses = list(micro_batches(step)), []
        num_targets = sum(batch["labels"][:, 1:].numel() for batch in batches)
        step_micro_batches(schedule, stages, batches, losses=losses)
        ownership.sum_tied_gradients(parameters)  # an embedding that is the head, too
        optimizer.step()
        optimizer.zero_grad()
        if stages[0].is_last:
            print(f"step {step + 1}: loss {sum(losses).item():.6f}", flush=True)
    save_split_model(model, tokenizer, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
