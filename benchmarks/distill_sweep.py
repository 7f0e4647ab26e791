"""Sweep SFT against distillation on few digits with right answers, in a plain PyTorch loop.

    python benchmarks/distill_sweep.py --rows 200 --rates 2e-3 --seeds 0

Teacher (4 decoder layers, all 1,437 rows, 300 steps) and student (2 layers) are the models of
distill_digits.py, with its optimizer, schedule and collation; rows are prepared once, so that a run
costs half of one by train_pp.py. Rows, order, steps and start of a seed are the same in each arm.
"""

import argparse
import copy
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dataset import Digits  # noqa: E402
from register import (  # noqa: E402
    collate_fn_register,
    image_token_register,
    import_shelf,
    prompt_fn_register,
    prompt_register,
)
from scripts.make_digits_model import make_config, make_processor, make_tokenizer  # noqa: E402
from stageline.data.batches.collate_part import as_collate_part  # noqa: E402

NUM_TRAIN, NUM_TEST = 1437, 360
ARMS: dict[str, tuple[float, float] | None] = {  # beta and temperature; None: SFT
    "SFT": None,
    "forward KL": (0.0, 1.0),
    "forward KL, temperature 2": (0.0, 2.0),
    "forward KL, temperature 3": (0.0, 3.0),
    "JSD, beta 0.5": (0.5, 1.0),
}
Batch = dict[str, torch.Tensor]


def collated(split: Any) -> Batch:
    """Return all rows of a split as one micro-batch."""
    tokenizer = make_tokenizer()
    rows = Digits(split=split)
    batch = as_collate_part(collate_fn_register["sft"])(
        [rows[index] for index in range(len(rows))],
        prompt=prompt_register["digits"],
        prompt_fn=prompt_fn_register["fill"],
        image_token=image_token_register["auto"],
        processor=make_processor(tokenizer),
        stage=0,
        pad_token_id=tokenizer.pad_token_id,
        max_token_num=64,
        num_stages=1,
    )
    return {name: value for name, value in batch.items() if torch.is_tensor(value)}


def make_model(num_layers: int, seed: int) -> torch.nn.Module:
    """Return the digits model with random weights."""
    config = copy.deepcopy(make_config(make_tokenizer()))
    config.text_config.num_hidden_layers = num_layers
    config.text_config.layer_types = config.text_config.layer_types[:num_layers]
    torch.manual_seed(seed)
    return transformers.InternVLForConditionalGeneration(config)


def logits_of(
    model: torch.nn.Module, batch: Batch, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [N, V] and labels [N] of the supervised tokens of some rows."""
    names = ("input_ids", "attention_mask", "pixel_values")
    logits = model(**{name: batch[name][rows] for name in names}).logits[:, :-1]
    labels = batch["labels"][rows][:, 1:]
    return logits[labels != -100], labels[labels != -100]


def divergence(
    logits: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float
) -> torch.Tensor:
    """Return the mean divergence of the loss `distill`, forward KL at beta 0."""
    p, q = ((one / temperature).log_softmax(-1) for one in (teacher, logits))
    if beta == 0:
        return (p.exp() * (p - q)).sum(-1).mean()
    mixture = torch.logaddexp(q + math.log(1 - beta), p + math.log(beta))
    both = beta * p.exp() * (p - mixture) + (1 - beta) * q.exp() * (q - mixture)
    return both.sum(-1).mean()


def train(
    model: torch.nn.Module,
    data: dict[str, Batch],
    rows: torch.Tensor,
    *,
    steps: int,
    rate: float,
    seed: int,
    batch_size: int,
    every: int,
    arm: tuple[float, float] | None = None,
    teacher: torch.Tensor | None = None,
) -> dict[int, float]:
    """Train on some rows; return step -> share of right held-out digits.

    Args:
        teacher: its logits of each row [1437, 2, V].
    """
    sizes = ((p.dim() > 1, p) for p in model.parameters())
    parts: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for is_matrix, parameter in sizes:
        parts[is_matrix].append(parameter)
    groups = [{"params": parts[one], "weight_decay": 0.05 * one} for one in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    generator, order, curve = torch.Generator().manual_seed(seed), [], {}
    warm, lowest = 20, 1e-4
    for step in range(steps):
        if len(order) < batch_size:
            order += rows[torch.randperm(len(rows), generator=generator)].tolist()
        chosen, order = torch.tensor(order[:batch_size]), order[batch_size:]
        done = (step - warm) / (steps - warm)
        cosine = lowest + (rate - lowest) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate * (step + 1) / warm if step < warm else cosine
        logits, labels = logits_of(model, data["train"], chosen)
        if arm is None:
            loss = torch.nn.functional.cross_entropy(logits, labels)
        else:
            assert teacher is not None
            loss = divergence(logits, teacher[chosen].flatten(0, 1), *arm)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                logits, labels = logits_of(model, data["test"], torch.arange(NUM_TEST))
            right = (logits.argmax(-1) == labels).float().mean().item()
            curve[step + 1] = 2 * right - 1  # the end token is always right
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[200])
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--teacher", type=Path, default=ROOT / "runs/distill-sweep/teacher.pt")
    parser.add_argument("--teacher-steps", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    import_shelf("prompt", "prompt_fn", "dataset")
    data = {split: collated(split) for split in ("train", "test")}
    if not given.teacher.exists():
        teacher, all_rows = make_model(4, 0), torch.arange(NUM_TRAIN)
        sizes = {"steps": given.teacher_steps, "rate": 2e-3, "seed": 0, "batch_size": 64}
        found = train(teacher, data, all_rows, **sizes, every=given.teacher_steps)
        print("teacher", found, flush=True)
        with torch.no_grad():
            found = [logits_of(teacher, data["train"], one)[0] for one in all_rows.split(128)]
        given.teacher.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.cat(found).view(NUM_TRAIN, 2, -1), given.teacher)
    teacher_logits = torch.load(given.teacher, weights_only=True)
    labels = data["train"]["labels"]
    labels_N2 = labels[labels != -100].view(NUM_TRAIN, 2)
    right_N2 = teacher_logits.softmax(-1).gather(-1, labels_N2[..., None])[..., 0]
    print(f"teacher: mean probability of the right digit {right_N2[:, 0].mean():.3f}", flush=True)
    for count in given.rows:
        rows = torch.randperm(NUM_TRAIN, generator=torch.Generator().manual_seed(1))[:count]
        for rate in given.rates:
            for seed in given.seeds:
                for name in given.arms:
                    began = time.process_time()
                    curve = train(
                        make_model(2, seed),
                        data,
                        rows,
                        steps=given.steps,
                        rate=rate,
                        seed=seed,
                        batch_size=given.batch_size,
                        every=given.every,
                        arm=ARMS[name],
                        teacher=teacher_logits,
                    )
                    cells = " | ".join(f"{value:.3f}" for value in curve.values())
                    spent = time.process_time() - began
                    print(
                        f"| {count} | {rate:g} | {seed} | {name} | {cells} | {spent:.0f} s |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
