"""The peers of peers.py, each as (rank, batches, turn) -> None: builds, then steps turn by turn.

All take the model's layers from the same classes and start from the same weights, so that what
differs is how the work is spread. AdamW, clipping to norm 1, float32, loss divided by the number
of targets of the whole batch.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from peers import NUM_MICRO_BATCHES, ROWS, VOCABULARY, Turn, status_mib
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import AutoConfig

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import make_schedule
from stageline.training.loss_part import count_targets
from stageline.training.step import TrainStep

CPU = torch.device("cpu")
RATE = 1e-4
Rows = list[list[int]]


def prepare(name: str) -> float:
    """Threads, imports and process group; MiB in use before any model is there."""
    torch.set_num_threads(1)
    if name.startswith("deepspeed"):
        import deepspeed

        # a kernel for all-reduces in shared memory, compiled for minutes, of no use to a pipeline
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
    elif name == "ddp_trainer":
        import transformers.trainer  # noqa: F401
    else:
        dist.init_process_group("gloo")
    return status_mib("VmRSS")


def model_config():
    """8 layers, 17 million parameters."""
    return AutoConfig.for_model(
        "llama",
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )


def build(stage: int, num_stages: int) -> CausalLMStage:
    model = CausalLMStage(model_config(), stage=stage, num_stages=num_stages)
    init_split_model(model, seed=0, device=CPU, dtype=torch.float32)
    model.frozen()
    return model.train()


def adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)


def padded(rows: Rows, width: int | None = None) -> dict[str, torch.Tensor]:
    """Rows as one micro-batch, as wide as its longest row unless `width` says otherwise."""
    width = width or max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def micro_batches(rows: Rows, width: int | None = None) -> list[dict[str, torch.Tensor]]:
    return [padded(rows[i : i + ROWS], width) for i in range(0, len(rows), ROWS)]


def widest(batches: list[Rows]) -> int:
    return max(len(row) for rows in batches for row in rows)


class Unmasked(torch.nn.Module):
    """A stage for those that pass one tensor on: the padding lies right, so causality hides it.

    Cheaper than a mask, so it favours the peers.
    """

    def __init__(self, stage: CausalLMStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden_or_ids: torch.Tensor) -> torch.Tensor:
        return self.stage(hidden_or_ids, attention_mask=torch.ones(hidden_or_ids.shape[:2]).long())


# -- ours ----------------------------------------------------------------------------------


def ours(rank: int, batches: list[Rows], turn: Turn, *, name: str) -> None:
    schedule = make_schedule(name, num_ranks=2)
    stages = [build(stage, schedule.num_stages) for stage in schedule.stages_of(rank)]
    step = TrainStep(
        PipelineRunner(stages, device=CPU, schedule=schedule),
        make_optimizer=lambda named: adamw(named.values()),
        loss_fn=sft,
        learning_rate=lambda step: RATE,
    )
    for index, _ in enumerate(turn):
        turn.done(step(micro_batches(batches[index]), step=index).loss)


# -- torch.distributed.pipelining ----------------------------------------------------------


def bare_torch(rank: int, batches: list[Rows], turn: Turn, *, schedule_class) -> None:
    """torch's stage has one shape for all time: every row is as wide as the widest of the run."""
    stage = build(rank, 2)
    count = torch.zeros(())
    width = widest(batches)
    schedule = schedule_class(
        PipelineStage(Unmasked(stage), rank, 2, CPU),
        NUM_MICRO_BATCHES,
        loss_fn=lambda logits, labels: sft(logits, {"labels": labels}, num_targets=count),
        scale_grads=False,
    )
    optimizer = adamw(stage.parameters())
    for index, _ in enumerate(turn):
        made = micro_batches(batches[index], width)
        count.fill_(count_targets(made))
        ids, labels = (torch.cat([m[key] for m in made]) for key in ("input_ids", "labels"))
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(ids, return_outputs=False)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        clip_together(stage)
        optimizer.step()
        turn.done(share(sum(losses, torch.zeros(()))))


def clip_together(stage: torch.nn.Module) -> None:
    """Clips to the norm of the whole model, as the others do."""
    grads = [p.grad for p in stage.parameters() if p.grad is not None]
    squared = torch.nn.utils.get_total_norm(grads) ** 2
    if dist.get_world_size() > 1:
        dist.all_reduce(squared)
    torch.nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, squared.sqrt())


def share(loss: torch.Tensor) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item()


# -- DeepSpeed -----------------------------------------------------------------------------


def deep_speed(rank: int, batches: list[Rows], turn: Turn, *, is_dynamic: bool) -> None:
    """PipelineModule with the same two stages; `dynamic_shape` sends shapes along."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    count = torch.zeros(())

    def loss_fn(logits, labels):  # DeepSpeed divides by the micro-batches
        return sft(logits, {"labels": labels}, num_targets=count) * NUM_MICRO_BATCHES

    module = PipelineModule(
        [LayerSpec(OneOfTwo, stage) for stage in range(2)],
        num_stages=2,
        loss_fn=loss_fn,
        partition_method="uniform",
        activation_checkpoint_interval=0,
        dynamic_shape=is_dynamic,
    )
    parameters = list(module.parameters())
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw(parameters),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": NUM_MICRO_BATCHES,
            "gradient_clipping": 1.0,
            "steps_per_print": 1000000,
        },
    )
    width = None if is_dynamic else widest(batches)
    for index, _ in enumerate(turn):
        made = micro_batches(batches[index], width)
        count.fill_(count_targets(made))
        loss = engine.train_batch(iter([(m["input_ids"], m["labels"]) for m in made]))
        turn.done(loss.item())


class OneOfTwo(Unmasked):
    """A stage as DeepSpeed builds it: from a class and a number."""

    def __init__(self, stage: int) -> None:
        super().__init__(build(stage, 2))


# -- Hugging Face Trainer ------------------------------------------------------------------


def ddp_trainer(rank: int, batches: list[Rows], turn: Turn) -> None:
    """The Trainer under DDP: both processes hold the whole model, each takes half the rows."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rounds(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            turn.wait()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                turn.done(logs["loss"])

    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=build(0, 1).whole,
        train_dataset=[row for rows in batches for row in rows],
        data_collator=padded,
        callbacks=[Rounds()],
        args=TrainingArguments(
            output_dir=f"/tmp/peers_trainer_{os.getpid()}",
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=NUM_MICRO_BATCHES // 2,
            num_train_epochs=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            adam_beta2=0.999,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            ddp_backend="gloo",
            remove_unused_columns=False,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    turn.wait()


# -- one after the other -------------------------------------------------------------------


def naive(rank: int, batches: list[Rows], turn: Turn) -> None:
    """What `device_map` does over two devices: one works while the other waits."""
    stage = build(rank, 2)
    optimizer = adamw(stage.parameters())
    for index, _ in enumerate(turn):
        made = micro_batches(batches[index])
        count = torch.tensor(float(count_targets(made)))
        optimizer.zero_grad()
        loss = torch.zeros(())
        for batch in made:
            loss += _first_half(stage, batch) if rank == 0 else _last_half(stage, batch, count)
        clip_together(stage)
        optimizer.step()
        turn.done(share(loss))


def _first_half(stage: CausalLMStage, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = stage(batch["input_ids"], attention_mask=batch["attention_mask"])
    dist.send(hidden.detach(), 1)
    grad = torch.empty_like(hidden)
    dist.recv(grad, 1)
    hidden.backward(grad)
    return torch.zeros(())


def _last_half(
    stage: CausalLMStage, batch: dict[str, torch.Tensor], count: torch.Tensor
) -> torch.Tensor:
    hidden = torch.empty(*batch["input_ids"].shape, stage.config.hidden_size)
    dist.recv(hidden, 0)
    hidden.requires_grad_()
    loss = sft(stage(hidden, attention_mask=batch["attention_mask"]), batch, num_targets=count)
    loss.backward()
    dist.send(hidden.grad, 0)
    return loss.detach()


def one_process(rank: int, batches: list[Rows], turn: Turn) -> None:
    """The unsplit model on one thread: `device_map` where both of its devices are one CPU."""
    model = build(0, 1).whole
    optimizer = adamw(model.parameters())
    for index, _ in enumerate(turn):
        made = micro_batches(batches[index])
        count = torch.tensor(float(count_targets(made)))
        optimizer.zero_grad()
        loss = torch.zeros(())
        for batch in made:
            part = model(**batch, num_items_in_batch=count, use_cache=False).loss
            part.backward()
            loss += part.detach()
        clip_together(model)
        optimizer.step()
        turn.done(loss.item())


WORKERS = {
    "ours_1f1b": lambda *a: ours(*a, name="1f1b"),
    "ours_interleaved_1f1b": lambda *a: ours(*a, name="interleaved_1f1b"),
    "torch_gpipe": lambda *a: bare_torch(*a, schedule_class=ScheduleGPipe),
    "torch_1f1b": lambda *a: bare_torch(*a, schedule_class=Schedule1F1B),
    "deepspeed": lambda *a: deep_speed(*a, is_dynamic=False),
    "deepspeed_dynamic": lambda *a: deep_speed(*a, is_dynamic=True),
    "ddp_trainer": ddp_trainer,
    "naive": naive,
    "one_process": one_process,
}
