"""What a person sees of a training run: the stage plan, the bar, evaluations, pictures."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from stageline.pipeline.live_bytes import tensor_bytes
from stageline.pipeline.timeline import TimelineEvent, describe_timeline
from stageline.plotting.pictures import caption, plot_predictions
from stageline.plotting.timeline import plot_timeline
from stageline.plotting.trace import write_trace
from stageline.training.evaluation import EvalResult
from stageline.training.memory import gather_peaks
from stageline.training.run_log import RunLog, StepRecord, name_figures
from stageline.training.stage_table import StageSummary, format_stage_table, human_bytes
from stageline.training.step import StepResult


class Context(Protocol):
    """Where this process stands; `stageline.distributed` has it."""

    is_main: bool
    rank: int
    device: torch.device
    pp_group: dist.ProcessGroup


def summarize_stage(model: torch.nn.Module, context: Context) -> StageSummary:
    """The figures of one stage of this rank."""
    parameters = dict(model.named_parameters())
    held = [
        part for part in model.parts() if any(model.part_of(name) == part for name in parameters)
    ]
    return StageSummary(
        stage=model.stage,
        rank=context.rank,
        device=str(context.device),
        layers=_layers_text(model),
        parts="+".join(held),
        num_parameters=sum(p.numel() for p in parameters.values()),
        num_trainable=sum(p.numel() for p in parameters.values() if p.requires_grad),
        num_bytes=tensor_bytes(parameters.values()),
    )


def _layers_text(model: torch.nn.Module) -> str:
    """ "0-6", and "tower 0-11" for a stage of a vision tower."""
    tower = getattr(model, "tower_layers", None)
    layers = tower or model.layers
    return f"{'tower ' if tower else ''}{layers[0]}-{layers[-1]}"


def _perplexity(result: EvalResult) -> str:
    return "" if result.perplexity is None else f" (perplexity {result.perplexity:.4g})"


class RunReport:
    """Reports a run into its folder and onto the screen; a context manager.

    Args:
        start_step: steps done before.
        log_steps: every how many steps one is written to the log.
        num_pictures: held-out samples whose predictions are kept at each evaluation.
        lr_scales: part of the model -> its learning rate as a multiple of the scheduled one.
        tracker: follows the run elsewhere; the main rank's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        context: Context,
        total_steps: int,
        start_step: int = 0,
        log_steps: int = 1,
        num_pictures: int = 24,
        memory_every: int = 10,
        lr_scales: Mapping[str, float] | None = None,
        tracker: Any | None = None,
    ) -> None:
        self.folder = folder
        self.context = context
        self.num_pictures = num_pictures
        self.memory_every = memory_every
        self.lr_scales = {part: scale for part, scale in (lr_scales or {}).items() if scale != 1.0}
        self.log = RunLog(
            folder,
            total_steps=total_steps,
            start_step=start_step,
            is_main=context.is_main,
            log_steps=log_steps,
            tracker=tracker,
        )
        self.peaks: list[int] = []

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, *error: object) -> None:
        # after a failure its cause counts, not what closing the log meets
        with contextlib.suppress(Exception) if error[0] else contextlib.nullcontext():
            self.log.close()

    def say(self, text: str) -> None:
        """Prints on the main rank."""
        self.log.print(text)

    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations in the log so far; the same on every rank of the run."""
        shared = [self.log.evaluations() if self.context.is_main else []]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def show_plan(self, summaries: Sequence[StageSummary]) -> None:
        """Prints the table of all stages; every rank calls this with its own."""
        gathered: list[Any] = [None] * dist.get_world_size(self.context.pp_group)
        dist.all_gather_object(gathered, list(summaries), group=self.context.pp_group)
        stages = sorted((s for part in gathered for s in part), key=lambda s: s.stage)
        self.say(format_stage_table(stages))

    def stepped(self, step: int, result: StepResult, seconds: float) -> None:
        """After each optimizer step."""
        if step == 1 or step % self.memory_every == 0:
            self.peaks = gather_peaks(self.context.device, group=self.context.pp_group)
        record = StepRecord(
            step=step,
            loss=result.loss,
            learning_rate=result.learning_rate,
            grad_norm=result.grad_norm,
            num_tokens=result.num_tokens,
            num_targets=result.num_targets,
            num_samples=result.num_samples,
            seconds=seconds,
            is_skipped=result.is_skipped,
            peak_memory_bytes=tuple(self.peaks),
            router_loss=result.extra_loss,
            problem=result.problem,
            rows=result.rows,
            skipped_in_a_row=result.skipped_in_a_row,
            num_skipped=result.num_skipped,
            warnings=result.warnings,
            loss_figures=result.figures,
            part_rates={p: result.learning_rate * scale for p, scale in self.lr_scales.items()},
            data_wait=result.data_wait,
        )
        self.log.log_step(record)

    def evaluated(
        self,
        step: int,
        result: EvalResult,
        *,
        dataset: Any,
        processor: Any,
        is_best: bool = False,
    ) -> None:
        """After each evaluation: figures, curve, and samples with their predictions.

        Args:
            is_best: the weights are kept as the best so far.
        """
        figures: dict[str, float | bool] = {**result.named(), "num_targets": result.num_targets}
        told = ""
        if result.token_accuracy is not None:
            told = f", token accuracy {result.token_accuracy:.4f} on {result.num_targets} tokens"
        if is_best:
            figures["is_best"] = True
        self.log.log_eval(step, figures)
        self.say(
            f"step {step}: held-out loss {result.loss:.4f}{_perplexity(result)}{told}"
            f"{name_figures(result.figures)}"
        )
        if self.context.is_main and result.predicted:
            self._draw_samples(step, result, dataset, processor)

    def transfers(self, sent_bytes: int, num_micro_batches: int) -> None:
        """After a step, what its ranks sent to each other; every rank calls this with its own."""
        total = torch.tensor(sent_bytes, dtype=torch.int64, device=self.context.device)
        dist.all_reduce(total, group=self.context.pp_group)
        if int(total):
            each = human_bytes(int(total) / num_micro_batches)
            self.say(
                f"between stages: {each} a micro-batch forward and back, hidden states alone "
                f"({human_bytes(int(total))} in a step of {num_micro_batches})"
            )

    def timeline(
        self,
        step: int,
        measured: Sequence[TimelineEvent],
        ideal: Sequence[TimelineEvent] | None = None,
    ) -> None:
        """After the step whose passes were timed; a later one replaces it. Main rank only.

        Args:
            measured: of all ranks; what other ranks than the main one give is not looked at.
            ideal: what a simulation with the measured mean times gives.
        """
        if not self.context.is_main or not measured:
            return
        title = f"{self.folder.resolve().name}, step {step}"
        plot_timeline(measured, ideal, self.folder / "timeline.png", title=title)
        write_trace(measured, self.folder / "timeline.json")
        self.say(f"timeline of step {step}: {describe_timeline(measured, ideal)}")

    def _draw_samples(self, step: int, result: EvalResult, dataset: Any, processor: Any) -> None:
        tokenizer = getattr(processor, "tokenizer", processor)
        images, titles, correct = [], [], []
        for index, ids in enumerate(result.predicted):
            if not ids:  # dropped, or another replica's
                continue
            pictures, sample = dataset[index]
            text = tokenizer.decode(ids, skip_special_tokens=True).strip()
            answer = str(sample.get("answer", sample.get("caption", ""))).strip()
            images.append(pictures[0] if pictures else None)
            titles.append(caption(str(sample.get("question", "")), text, answer))
            correct.append(text == answer if answer else None)
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        plot_predictions(images, titles, correct, folder / f"step-{step:08d}.png")
