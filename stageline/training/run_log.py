"""What a run leaves behind: a JSON-lines log, TensorBoard events, a bar, the loss curve.

Only the main rank writes; on others every method does nothing. Knows neither model nor data.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from stageline.distributed.process_group import DistributedContext
from stageline.errors import StorageError
from stageline.modules.quantised import num_weights
from stageline.pipeline.live_bytes import tensor_bytes
from stageline.pipeline.recorder import TimelineEvent, describe_timeline
from stageline.run_records import cut_torn_line, finite, read_log
from stageline.stage import Stage
from stageline.tables import format_table, human_bytes, human_count, human_memory
from stageline.terminal import beside_bar, terminal
from stageline.training.evaluation import EvalResult
from stageline.training.memory import gather_peaks
from stageline.training.step import StepResult
from stageline.training.timeline import write_trace

MAX_LINES = 50  # of progress, where there is no terminal
MAX_SHOWN = 6  # figures of a loss in a line
MEMORY_EVERY = 10  # steps between two looks at the peak of memory
TOLD_WAIT = 0.05  # share of the time; a run that waits more for data can be made faster


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepResult):
    """One optimizer step as it is logged and shown.

    Attributes:
        step: steps done; the first one is 1.
        seconds: from the batch to the updated weights.
        peak_memory_bytes: of each rank of the pipeline (of one process with several devices, of
            each device) since the start; empty: not known.
        part_rates: part of the model -> its learning rate, of those that have one of their own.
        wait_share: of the seconds since the last line on the screen, those before batches came.
        bubble: share of all ranks' time in which nothing was computed; None: not measured.
    """

    step: int
    seconds: float
    peak_memory_bytes: tuple[int, ...] = ()
    part_rates: Mapping[str, float] = field(default_factory=dict)
    wait_share: float = 0.0
    bubble: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def logged(self) -> dict[str, Any]:
        """What stands in the log, by name."""
        figures = {
            "loss": self.loss,
            **self.answers,
            **self.figures,
            **({"loss_figures": list(self.figures)} if self.figures else {}),
            **({"router_loss": self.extra_loss} if self.extra_loss else {}),
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            **{f"learning_rate_{part}": rate for part, rate in self.part_rates.items()},
            "num_tokens": self.num_tokens,
            "num_targets": self.num_targets,
            "num_samples": self.num_samples,
            "tokens_per_second": round(self.tokens_per_second, 1),
            **({} if self.bubble is None else {"bubble": round(self.bubble, 4)}),
            "seconds": round(self.seconds, 4),
            "data_wait": round(self.data_wait, 4),
            "is_skipped": self.is_skipped,
            "peak_memory_bytes": list(self.peak_memory_bytes),
        }
        if self.problem is not None:
            figures["trouble"] = {
                "problem": self.problem,
                "rows": list(self.rows),
                "skipped_in_a_row": self.skipped_in_a_row,
                "num_skipped": self.num_skipped,
            }
        return {**figures, "warnings": list(self.warnings)} if self.warnings else figures

    def notes(self) -> list[str]:
        """Lines for the screen about what is wrong with the step; mostly none."""
        notes = list(self.warnings)
        if self.is_skipped:
            times = f"{self.skipped_in_a_row} in a row, {self.num_skipped} in all"
            notes.insert(0, f"skipped, no weight changed ({times}): {self.problem}")
        elif self.problem is not None:
            notes.insert(0, self.problem)
        return notes

    def __str__(self) -> str:
        skipped = ", skipped" if self.is_skipped else ""
        router = f", router loss {self.extra_loss:.4f}" if self.extra_loss else ""
        figures = name_figures({**self.answers, **self.figures}, most=MAX_SHOWN)  # the log has all
        own = ", ".join(f"{part} {rate:.2e}" for part, rate in self.part_rates.items())
        rates = f", learning rate {self.learning_rate:.2e} ({own})" if own else ""
        return f"loss {self.loss:.4f}{router}{figures}{skipped}{rates}, {self.pace}"

    @property
    def pace(self) -> str:
        """How the run goes: tokens a second, the bubble, memory of each rank."""
        waits = self.wait_share > TOLD_WAIT
        data = f", {100 * self.wait_share:.0f} % waiting for data" if waits else ""
        idle = "" if self.bubble is None else f", bubble {100 * self.bubble:.0f} %"
        memory = human_memory(self.peak_memory_bytes)
        return f"{self.tokens_per_second:,.0f} tokens/s{idle}, memory {memory}{data}"


class RunLog:
    """Writes into a run folder; an existing log is continued.

    Args:
        folder: is made; gets log.jsonl, run.log, tensorboard/ and loss.png.
        is_main: whether this rank writes.
        start_step: steps done before; events and curves beyond it are replaced.
        log_steps: every how many steps one is written; the first and the last always are.
        tracker: is told the same figures, `tracker.log(kind, step, figures)`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        total_steps: int,
        is_main: bool = True,
        start_step: int = 0,
        log_steps: int = 1,
        tracker: Any | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.is_main = is_main
        self.total_steps = total_steps
        self.start_step = start_step
        self.log_steps = log_steps
        self._tracker = tracker
        self._beside = contextlib.ExitStack()
        if not is_main:
            self._beside.enter_context(beside_bar(None))
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "log.jsonl"
        terminal.keep(self.folder / "run.log")
        cut_torn_line(self.path)
        self._file = self.path.open("a+", encoding="utf-8")
        self._events = _open_events(self.folder / "tensorboard", start_step=start_step)
        if start_step and self._has_records():
            self._write("resume", start_step, {})
        # a bar that redraws itself is for terminals; a file of output gets lines
        self._has_bar = sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            disable=not self._has_bar,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}",
        )
        if self._has_bar:
            self._beside.enter_context(beside_bar(self._bar))
        self._line_every = line_interval(total_steps - start_step)
        self._start = time.monotonic()
        self._waited = self._seconds = 0.0  # since the last line
        self._bubble: float | None = None  # the last one that was measured

    def log_step(self, record: StepRecord) -> None:
        """Logs one optimizer step and shows it."""
        if not self.is_main:
            return
        is_end = record.step in (self.start_step + 1, self.total_steps)
        notes = record.notes()
        if is_end or notes or record.step % self.log_steps == 0:
            self._write("train", record.step, record.logged())
        for note in notes:
            self.say(f"step {record.step}/{self.total_steps}: {note}")
        self._waited += record.data_wait
        self._seconds += record.seconds
        self._bubble = record.bubble if record.bubble is not None else self._bubble
        # the seconds of a step may leave out those that its batch took to come
        share = self._waited / max(self._seconds, self._waited, 1e-9)
        record = replace(record, wait_share=share, bubble=self._bubble)
        terminal.started()
        is_line = is_end or record.step % self._line_every == 0
        if is_line:
            seconds = (time.monotonic() - self._start) / (record.step - self.start_step)
            left = tqdm.format_interval(seconds * (self.total_steps - record.step))
            line = f"step {record.step}/{self.total_steps}: {record}, {left} left"
            terminal.say(line, is_detail=self._has_bar)
        if is_line or self._has_bar:
            self._waited = self._seconds = 0.0
        if self._has_bar:
            # the narrowest terminal shows what comes first
            self._bar.set_postfix_str(f"loss {record.loss:.4f}, {record.pace}", refresh=False)
            self._bar.update(record.step - self._bar.n)

    def log_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        """Logs an evaluation and redraws the curve."""
        if self.is_main:
            self._write("eval", step, figures)
            self.draw()

    def evaluations(self, folder: Path | None = None) -> list[dict[str, Any]]:
        """What was logged of evaluations, also before a resume; in the folder of another run."""
        path = self.path if folder is None else folder / self.path.name
        return read_log(path)[1] if path.exists() else []

    def _has_records(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def say(self, text: str, *, is_detail: bool = False) -> None:
        """Prints without breaking the bar, on the main rank; a detail is for run.log alone."""
        if self.is_main:
            terminal.say(text, is_detail=is_detail)

    def draw(self, *, has_pdf: bool = False) -> None:
        """Draws loss.png from the log; the PDF comes at the end."""
        if self.is_main and self._has_records():
            from stageline.plotting.figures import plot_loss  # slow to import; one rank needs it

            plot_loss(self.path, self.folder / "loss.png", has_pdf=has_pdf)

    def close(self) -> None:
        """Ends the bar and all files and draws the last curve; a second call does nothing."""
        self._beside.close()
        if not self.is_main or self._file.closed:
            return
        self._bar.close()
        self._file.close()
        self._tell_events(lambda events: events.close())
        self._tell(lambda tracker: tracker.close())
        self.draw(has_pdf=True)

    def _write(self, kind: str, step: int, figures: Mapping[str, Any]) -> None:
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **finite(figures)}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"the log in {self.folder} cannot be written ({error}), a folder with room was "
                "expected: it was removed, or the disk is full. The checkpoints there are as they "
                "were. Make room, then resume."
            ) from error
        self._tell_events(lambda events: _add_scalars(events, kind, step, figures))
        if figures:
            self._tell(lambda tracker: tracker.log(kind, step, scalars(finite(figures))))

    def _tell_events(self, what: Callable[[Any], object]) -> None:
        """Writes TensorBoard events, or ends them."""
        if (error := _failure_of(self._events, what)) is not None:
            self._events = None
            self.say(
                f"note: no more TensorBoard events are written into {self.folder / 'tensorboard'} "
                f"({error}); {self.path} has every figure. If the disk is "
                "full, make room: the next checkpoint needs it, too"
            )

    def _tell(self, what: Callable[[Any], object]) -> None:
        """Tells the tracker, or leaves it alone from then on."""
        if (error := _failure_of(self._tracker, what)) is not None:
            self._tracker = None
            self.say(
                f"note: the tracker failed ({error}); it is not told "
                f"anything more, {self.path} has every figure"
            )


def _failure_of(listener: Any | None, what: Callable[[Any], object]) -> str | None:
    """What went wrong in telling a listener, if there is one: no run ends of it."""
    if listener is None:
        return None
    try:
        what(listener)
    except Exception as error:  # a service elsewhere, or a thread, raises what it likes
        return f"{type(error).__name__}: {error}"
    return None


def name_figures(figures: Mapping[str, float], most: int | None = None) -> str:
    """Named figures for the end of a line: ", marked loss 0.1234"; empty where there are none."""
    shown = list(figures.items())[:most]
    return "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in shown)


def scalars(figures: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the figures; of a list of numbers one for each rank."""
    numbers: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, int | float):
            numbers[name] = float(value)
        elif isinstance(value, list | tuple):
            for rank, item in enumerate(value):
                if isinstance(item, int | float):
                    numbers[f"{name}/rank_{rank}"] = float(item)
    return numbers


def line_interval(num_steps: int) -> int:
    """Every how many steps a line is printed: 1, 2, 5, 10 ..., so that they stay few."""
    power = 1
    while True:
        for interval in (power, 2 * power, 5 * power):
            if num_steps <= interval * MAX_LINES:
                return interval
        power *= 10


def _open_events(folder: Path, *, start_step: int) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter  # slow to import; one rank needs it
    except ImportError as error:
        print(
            f"note: no TensorBoard events are written ({error}); pip install tensorboard",
            file=sys.stderr,
        )
        return None
    # evaluations at step 0 come before the first step, those at a later start have been made
    purge_step = (start_step + 1 if start_step else 0) if folder.exists() else None
    return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)


def _add_scalars(events: Any, kind: str, step: int, figures: Mapping[str, Any]) -> None:
    for name, value in scalars(figures).items():
        events.add_scalar(f"{kind}/{name}", value, step)


@dataclass(frozen=True)
class StageSummary:
    """One stage in figures.

    Attributes:
        layers: global indices of its layers, as text such as "0-6".
        parts: names of the parts it holds.
        num_parameters, num_trainable: a tied weight counts on each stage that holds it; of a
            quantised one the numbers that it was made of.
        num_bytes: of the weights.
        notes: lines to print about it.
        shared: name -> (parameters, trainable) of weights that other stages may hold, too.
    """

    stage: int
    rank: int
    device: str
    layers: str
    parts: str
    num_parameters: int
    num_trainable: int
    num_bytes: int
    notes: tuple[str, ...] = ()
    shared: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def count_parameters(stages: Sequence[StageSummary]) -> tuple[int, int]:
    """Parameters of these stages together and the trainable ones; a tied weight counts once."""
    held: dict[str, tuple[int, int]] = {}
    total = trained = 0
    for one in stages:
        again = [counts for name, counts in one.shared.items() if name in held]
        total += one.num_parameters - sum(count for count, _ in again)
        trained += one.num_trainable - sum(count for _, count in again)
        held.update(one.shared)
    return total, trained


def format_stage_table(stages: Sequence[StageSummary]) -> str:
    """A line a stage and, where there are several, a line of totals.

    The share is that of the weights' bytes: what memory and, roughly, time go by. Bytes of a tied
    weight are on each stage that holds it, its parameters once in the totals.
    """
    all_bytes = sum(stage.num_bytes for stage in stages)

    def figures(rows: Sequence[StageSummary]) -> list[str]:
        num_bytes = sum(row.num_bytes for row in rows)
        return [
            *map(human_count, count_parameters(rows)),
            human_bytes(num_bytes),
            f"{num_bytes / max(all_bytes, 1):.1%}",
        ]

    texts = ["stage", "rank", "device", "layers", "parts"]
    rows = [[*texts, "parameters", "trainable", "weights", "share"]]
    for row in stages:
        place = [str(row.stage), str(row.rank), row.device, row.layers, row.parts]
        rows.append([*place, *figures([row])])
    if len(stages) == 1:
        return format_table(rows, num_texts=len(texts), rules=[1])
    rows.append(["all", "", "", "", "", *figures(stages)])
    return format_table(rows, num_texts=len(texts), rules=[1, len(rows) - 1])


def stages_line(stages: Sequence[StageSummary]) -> str:
    """The table in a line."""
    layers, weights = (
        " | ".join(texts)
        for texts in zip(*((one.layers, human_bytes(one.num_bytes)) for one in stages), strict=True)
    )
    count, trained = map(human_count, count_parameters(stages))
    num = f"{len(stages)} stage{'s' * (len(stages) > 1)}"
    return f"{num}, layers {layers}: {count} parameters, {trained} trainable; weights {weights}"


def summarize_stage(model: Stage, context: DistributedContext) -> StageSummary:
    """The figures of one stage of this rank."""
    parameters = dict(model.named_parameters())
    counts = {n: (num_weights(p), num_weights(p) * p.requires_grad) for n, p in parameters.items()}
    shared = getattr(model, "shared_names", ())
    start = getattr(model, "start", None) if model.stage == 0 else None
    held = [
        part for part in model.parts() if any(model.part_of(name) == part for name in parameters)
    ]
    return StageSummary(
        stage=model.stage,
        rank=context.rank,
        device=" ".join(map(str, context.devices)),
        layers=_layers_text(model),
        parts="+".join(held),
        num_parameters=sum(count for count, _ in counts.values()),
        num_trainable=sum(trained for _, trained in counts.values()),
        num_bytes=tensor_bytes(parameters.values()),
        notes=(*getattr(model, "notes", ()), *getattr(start, "notes", ())),
        shared={name: counts[name] for name in shared if name in counts},
    )


def _layers_text(model: Stage) -> str:
    """ "0-6", and "tower 0-11" for a stage of a vision tower."""
    tower = getattr(model, "tower_layers", None)
    layers = tower or model.layers
    return f"{'tower ' if tower else ''}{layers[0]}-{layers[-1]}"


class RunReport(RunLog):
    """Reports a run into its folder and onto the screen; a context manager.

    Args:
        lr_scales: part of the model -> its learning rate as a multiple of the scheduled one.
        log: of `RunLog`.

    Attributes:
        num_pictures: held-out samples whose predictions are kept at each evaluation.
    """

    num_pictures = 24

    def __init__(
        self,
        folder: Path,
        *,
        context: DistributedContext,
        lr_scales: Mapping[str, float] | None = None,
        **log: Any,
    ) -> None:
        super().__init__(folder, is_main=context.is_main, **log)
        self.context = context
        self.lr_scales = {part: scale for part, scale in (lr_scales or {}).items() if scale != 1.0}
        self.peaks: list[int] = []

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, *error: object) -> None:
        # after a failure its cause counts, not what closing the log meets
        with contextlib.suppress(Exception) if error[0] else contextlib.nullcontext():
            self.close()

    def evaluations(self, folder: Path | None = None) -> list[dict[str, Any]]:
        """The records of evaluations in the log so far; the same on every rank of the run."""
        shared = [super().evaluations(folder) if self.is_main else []]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def show_plan(self, summaries: Sequence[StageSummary]) -> None:
        """Says what the stages are, their table in run.log; every rank calls this with its own."""
        gathered: list[Any] = [None] * dist.get_world_size(self.context.pp_group)
        dist.all_gather_object(gathered, list(summaries), group=self.context.pp_group)
        stages = sorted((s for part in gathered for s in part), key=lambda s: s.stage)
        for note in dict.fromkeys(note for one in stages for note in one.notes):
            self.say(note)
        self.say(format_stage_table(stages), is_detail=True)
        self.say(stages_line(stages))

    def stepped(
        self, step: int, result: StepResult, seconds: float, *, bubble: float | None = None
    ) -> None:
        """After each optimizer step; with its bubble where that was measured."""
        if not self.peaks or step % MEMORY_EVERY == 0:  # the first of a run that goes on, too
            self.peaks = gather_peaks(self.context.devices, group=self.context.pp_group)
        record = StepRecord(
            **vars(result),
            step=step,
            seconds=seconds,
            peak_memory_bytes=tuple(self.peaks),
            part_rates={p: result.learning_rate * scale for p, scale in self.lr_scales.items()},
            bubble=bubble,
        )
        self.log_step(record)

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
        told = perplexity = ""
        if result.perplexity is not None:
            perplexity = f" (perplexity {result.perplexity:.4g})"
        if result.token_accuracy is not None:
            told = f", token accuracy {result.token_accuracy:.4f} on {result.num_targets} tokens"
        if is_best:
            figures["is_best"] = True
        self.log_eval(step, figures)
        loss = "" if result.loss is None else f" loss {result.loss:.4f}"
        told += name_figures(result.figures)
        self.say(f"step {step}: held-out{loss}{perplexity}{told}")
        if self.is_main and result.predicted:
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
        if not self.is_main or not measured:
            return
        from stageline.plotting.figures import plot_timeline

        title = f"{self.folder.resolve().name}, step {step}"
        plot_timeline(measured, ideal, self.folder / "timeline.png", title=title)
        write_trace(measured, self.folder / "timeline.json")
        self.say(f"timeline of step {step}: {describe_timeline(measured, ideal)}")

    def _draw_samples(self, step: int, result: EvalResult, dataset: Any, processor: Any) -> None:
        from stageline.plotting.pictures import caption, plot_predictions, shown

        tokenizer = getattr(processor, "tokenizer", processor)
        images, titles, correct, names = [], [], [], []
        for index, ids in enumerate(result.predicted):
            if not ids:  # dropped, or another replica's
                continue
            pictures, sample = dataset[index]
            text = tokenizer.decode(ids, skip_special_tokens=True).strip()
            picture, question, answer = shown(sample, pictures)
            answer = answer.strip()
            images.append(picture)
            titles.append(caption(question, text, answer))
            correct.append(text == answer if answer else None)
            names.append(str(sample.get("id", index)))
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        plot_predictions(images, titles, correct, folder / f"step-{step:08d}.png", ids=names)
