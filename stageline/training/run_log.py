"""Write the log of a run: JSON lines, TensorBoard events, a progress bar, the loss curve.

Only the main rank writes; on others every method does nothing.
"""

import contextlib
import functools
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile
from tqdm.contrib.logging import logging_redirect_tqdm

from stageline.distributed.process_group import DistributedContext
from stageline.distributed.terminal import terminal
from stageline.errors import StorageError, spelled
from stageline.modules.lora import is_expert_lora
from stageline.modules.quantised import plain_shape
from stageline.pipeline.live_bytes import tensor_bytes
from stageline.pipeline.recorder import TimelineEvent, describe_timeline
from stageline.run_records import cut_torn_line, finite, read_log
from stageline.stage import Stage
from stageline.tables import human_bytes, human_count, human_memory
from stageline.training.evaluation import BestCheckpoint, EvalResult
from stageline.training.memory import gather_peaks
from stageline.training.step import StepResult
from stageline.training.timeline import write_trace

MAX_LINES = 50  # lines of progress, where there is no terminal
MAX_SHOWN = 6  # metrics of a loss in a line
EVENTS = "to TensorBoard"
MEMORY_EVERY = 10  # steps between two looks at the peak of memory
BY_LAYER = "_by_layer"  # ends the name of {layer: number}
TOLD_WAIT = 0.05  # share of the time; a run that waits more for data can be made faster


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepResult):
    """One optimizer step as it is logged and shown.

    Attributes:
        peak_memory_bytes: of each rank of the pipeline, or of each device of a single process.
        part_rates: part of the model -> its learning rate, of those that have one of their own.
        expert_tokens: experts' module -> tokens of each expert; empty: none, or not read.
    """

    step: int  # steps done; the first one is 1
    seconds: float  # from the batch to the updated weights
    peak_memory_bytes: tuple[int, ...] = ()
    part_rates: Mapping[str, float] = field(default_factory=dict)
    expert_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    wait_share: float = 0.0  # the share of the seconds that went into waiting for batches
    bubble: float | None = None  # idle share of the time of all ranks; None: not measured

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @functools.cached_property
    def expert_load(self) -> dict[str, Any]:
        """Return figures of the routers' balance: 1 is the mean load of an expert in its layer."""
        loads, idle = {}, {}
        for name, counts in self.expert_tokens.items():
            layer = next((part for part in name.split(".") if part.isdigit()), name)
            layer = name if layer in loads else layer
            loads[layer] = round(max(counts) * len(counts) / max(sum(counts), 1), 3)
            idle[layer] = round(counts.count(0) / len(counts), 4)
        if not loads:
            return {}
        return {
            "expert_load": max(loads.values()),
            "idle_experts": round(sum(idle.values()) / len(idle), 4),
            f"expert_load{BY_LAYER}": loads,
            f"idle_experts{BY_LAYER}": idle,
        }

    def logged(self) -> dict[str, Any]:
        """Return the record of the log, by name."""
        figures: dict[str, Any] = {"loss": self.loss, **self.answers, **self.figures}
        if self.figures:
            figures["loss_figures"] = list(self.figures)
        if self.extra_loss:
            figures["router_loss"] = self.extra_loss
        figures |= self.expert_load | {
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            **{f"lr_{part}": rate for part, rate in self.part_rates.items()},
            "num_tokens": self.num_tokens,
            "num_targets": self.num_targets,
            "num_samples": self.num_samples,
            "tok/s": round(self.tokens_per_second, 1),
        }
        if self.bubble is not None:
            figures["bubble"] = round(self.bubble, 4)
        figures |= {
            "seconds": round(self.seconds, 4),
            "data_wait": round(self.data_wait, 4),
            "is_skipped": self.is_skipped,
            "peak_memory_bytes": list(self.peak_memory_bytes),
        }
        if self.problem is not None:
            figures["trouble"] = {
                "problem": self.problem,
                "skipped_in_a_row": self.skipped_in_a_row,
                "num_skipped": self.num_skipped,
                "rows": list(self.rows),
            }
        if self.warnings:
            figures["warnings"] = list(self.warnings)
        return figures

    def notes(self) -> list[str]:
        """Return lines for the screen about what is wrong with the step; mostly none."""
        problem = self.problem
        if self.is_skipped:
            times = f"{self.skipped_in_a_row} in a row, {self.num_skipped} in all"
            problem = f"skipped, no weight changed ({times}): {problem}"
        return [*([] if problem is None else [problem]), *self.warnings]

    def __str__(self) -> str:
        shown = {"loss": self.loss}
        if self.extra_loss:
            shown["router_loss"] = self.extra_loss
        own = {**self.answers, **self.figures}
        shown |= dict(list(own.items())[:MAX_SHOWN])  # the log has all
        rates = "".join(f", {part} {rate:.1e}" for part, rate in self.part_rates.items())
        fields = [f"{name} {value:.4f}" for name, value in shown.items()]
        if self.expert_load:
            fields.append(f"expert_load {self.expert_load['expert_load']:.2f}")
        fields += ["skipped"] * self.is_skipped
        fields += [f"grad_norm {self.grad_norm:.3g}", f"lr {self.learning_rate:.1e}{rates}"]
        return " | ".join([*fields, *self.pace])

    @property
    def pace(self) -> list[str]:
        """Return tokens per second, the bubble, the wait for data, and the memory of each rank."""
        fields = [f"{self.tokens_per_second:,.0f} tok/s"]
        if self.bubble is not None:
            fields.append(f"bubble {100 * self.bubble:.0f}%")
        if self.wait_share > TOLD_WAIT:
            fields.append(f"data_wait {100 * self.wait_share:.0f}%")
        return [*fields, f"mem {human_memory(self.peak_memory_bytes)}"]


class RunLog:
    """The log of a run in its folder and on the screen; a context manager.

    Args:
        folder: gets log.jsonl, run.log, tensorboard/ and loss.png; of a mixture of experts also
            expert_tokens.jsonl. An existing log is continued.
        context: where this rank stands; None: it is the only one.
        start_step: steps done before; events and curves beyond it are replaced.
        log_steps: steps between two records; the first and the last step always have one.
        lr_scales: part of the model -> its learning rate as a multiple of the scheduled one.
        tracker: gets the same figures, `tracker.log(kind, step, figures)`.

    Attributes:
        num_pictures: held-out samples whose predictions are kept at each evaluation.
    """

    num_pictures = 24

    def __init__(
        self,
        folder: str | Path,
        *,
        total_steps: int,
        context: DistributedContext | None = None,
        start_step: int = 0,
        log_steps: int = 1,
        lr_scales: Mapping[str, float] | None = None,
        tracker: Any | None = None,
    ) -> None:
        self.folder, self.context = Path(folder), context
        self.is_main = context is None or context.is_main
        self.lr_scales = {part: scale for part, scale in (lr_scales or {}).items() if scale != 1.0}
        self._peaks: list[int] = []
        self._held_out: list[str] = []  # the last evaluation
        self.total_steps, self.start_step, self.log_steps = total_steps, start_step, log_steps
        # 1, 2, 5, 10 ... steps between two lines on the screen, so that they stay few
        intervals = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
        num_steps = total_steps - start_step
        self._line_every = next(one for one in intervals if num_steps <= one * MAX_LINES)
        self._listeners: dict[str, Any] = {"to the tracker": tracker}
        self._beside = contextlib.ExitStack()
        if not self.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "log.jsonl"
        terminal.keep(self.folder / "run.log")
        self._experts_path = self.folder / "expert_tokens.jsonl"
        cut_torn_line(self.path)
        cut_torn_line(self._experts_path)
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            self._listeners[EVENTS] = _Events(self.folder / "tensorboard", start_step)
        except ImportError as error:
            told = f"note: no TensorBoard events are written ({error}); pip install tensorboard"
            print(told, file=sys.stderr)
        if start_step and self.path.stat().st_size > 0:
            self._write("resume", start_step, {})
        # a bar that redraws itself is for terminals; a file of output gets lines
        self._has_bar = sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            disable=not self._has_bar,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} | eta {remaining}{postfix}",
        )
        if self._has_bar:
            # others print and log in whole lines above the bar
            known = [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
            shows = [
                logger
                for logger in known
                if any(getattr(one, "stream", None) is sys.stderr for one in logger.handlers)
            ]
            self._beside.enter_context(logging_redirect_tqdm(shows))
            above: Any = DummyTqdmFile(self._bar.fp)
            if sys.stdout.isatty():
                self._beside.enter_context(contextlib.redirect_stdout(above))
            self._beside.enter_context(contextlib.redirect_stderr(above))
        self._start = time.monotonic()
        self._waited = self._seconds = 0.0  # since the last line
        self._bubble: float | None = None  # the last one that was measured

    def log_step(self, record: StepRecord) -> None:
        """Log one optimizer step and show it."""
        if not self.is_main:
            return
        notes = record.notes()
        if notes or self._is_due(record.step, self.log_steps):
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
        if is_line := self._is_due(record.step, self._line_every):
            if record.expert_tokens:
                with self._experts_path.open("a", encoding="utf-8") as file:
                    self._append(file, {"step": record.step, **record.expert_tokens})
            seconds = (time.monotonic() - self._start) / (record.step - self.start_step)
            left = duration(seconds * (self.total_steps - record.step))
            line = f"step {record.step}/{self.total_steps} | {record} | eta {left}"
            terminal.say(line, is_detail=self._has_bar)
        if is_line or self._has_bar:
            self._waited = self._seconds = 0.0
        if self._has_bar:
            # the narrowest terminal shows what comes first
            shown = " | ".join([f"loss {record.loss:.4f}", *record.pace])
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(record.step - self._bar.n)

    def _is_due(self, step: int, *intervals: int) -> bool:
        is_end = step in (self.start_step + 1, self.total_steps)
        return is_end or any(step % interval == 0 for interval in intervals)

    def log_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        """Log an evaluation and redraw the curve."""
        if self.is_main:
            self._write("eval", step, figures)
            self.draw()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        # after a failure its cause counts, not what closing the log meets
        with contextlib.suppress(Exception) if error[0] else contextlib.nullcontext():
            self.close()

    def evaluations(self, folder: Path) -> list[dict[str, Any]]:
        """Return the evaluations in the log of a run folder, on all ranks."""
        path = folder / "log.jsonl"
        shared = [read_log(path)[1] if self.is_main and path.exists() else []]
        if self.context is not None:
            dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def say(self, text: str, *, is_detail: bool = False) -> None:
        """Print without breaking the bar, on the main rank; a detail goes only into run.log."""
        if self.is_main:
            terminal.say(text, is_detail=is_detail)

    def draw(self, *, has_pdf: bool = False) -> None:
        """Draw loss.png from the log; the PDF comes at the end."""
        if self.is_main and self.path.exists() and self.path.stat().st_size > 0:
            from stageline.plotting.figures import plot_loss  # slow to import; one rank needs it

            plot_loss(self.path, self.folder / "loss.png", has_pdf=has_pdf)

    def close(self) -> None:
        """End the bar and all files and draw the last curve; a second call does nothing."""
        self._beside.close()
        if not self.is_main or self._file.closed:
            return
        self._bar.close()
        self._file.close()
        for name in self._listeners:
            self._tell(name, lambda listener: listener.close())
        self.draw(has_pdf=True)

    def _write(self, kind: str, step: int, figures: Mapping[str, Any]) -> None:
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **finite(figures)}
        self._append(self._file, record)
        if figures:  # events have inf and nan; a service may not take them
            self._tell(EVENTS, lambda events: events.log(kind, step, scalars(figures)))
            told = scalars(finite(figures))
            self._tell("to the tracker", lambda tracker: tracker.log(kind, step, told))

    def _append(self, file: TextIO, record: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
        except OSError as error:
            raise StorageError(
                f"the log in {self.folder} cannot be written ({error}). Make room, then resume: "
                "its checkpoints are as they were."
            ) from error

    def _tell(self, name: str, what: Callable[[Any], object]) -> None:
        """Call a listener, which is dropped when it fails: no run ends because of it."""
        listener = self._listeners.get(name)
        if listener is None:
            return
        try:
            what(listener)
        except Exception as error:  # a service elsewhere, or a thread, raises what it likes
            self._listeners[name] = None
            self.say(
                f"note: no more figures go {name} of {self.folder} ({type(error).__name__}: "
                f"{error}). log.jsonl has every figure; if the disk is full, make room."
            )

    def stepped(
        self,
        step: int,
        result: StepResult,
        seconds: float,
        *,
        bubble: float | None = None,
        read_expert_tokens: Callable[[], Mapping[str, Sequence[int]]] = dict,
    ) -> None:
        """Log an optimizer step, with its bubble where that was measured; every rank calls this."""
        assert self.context is not None
        if not self._peaks or step % MEMORY_EVERY == 0:  # the first of a resumed run, too
            self._peaks = gather_peaks(self.context.devices, group=self.context.pp_group)
        rates = {part: result.learning_rate * scale for part, scale in self.lr_scales.items()}
        given: dict[str, Any] = {"step": step, "seconds": seconds, "bubble": bubble}
        given |= {"peak_memory_bytes": tuple(self._peaks), "part_rates": rates, **vars(result)}
        record = StepRecord(**given)
        if record.notes() or self._is_due(step, self.log_steps, self._line_every):
            record = replace(record, expert_tokens=read_expert_tokens())
        self.log_step(record)

    def evaluated(
        self, step: int, result: EvalResult, *, dataset: Any, processor: Any, is_best: bool = False
    ) -> None:
        """Log an evaluation: figures, curve, and samples with their predictions."""
        figures: dict[str, float | bool] = {**result.named(), "num_targets": result.num_targets}
        self.log_eval(step, figures | ({"is_best": True} if is_best else {}))
        self._held_out = [f"{name} {value:.4f}" for name, value in result.named().items()]
        shown = self._held_out
        self.say(f"step {step} | held-out {' | '.join(shown)} | num_targets {result.num_targets}")
        if not self.is_main or not (result.completions or result.predicted):
            return
        from stageline.plotting.pictures import plot_predictions

        tokenizer = getattr(processor, "tokenizer", processor)
        rows = []
        texts: list[str | None] = [*result.completions[: self.num_pictures]]
        for ids in () if texts else result.predicted:
            texts.append(tokenizer.decode(ids, skip_special_tokens=True) if ids else None)
        for index, text in enumerate(texts):
            if text is not None:  # else dropped, or another replica's
                images, sample = dataset[index]
                rows.append((images, {"id": index, **sample}, text))
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        plot_predictions(rows, folder / f"step-{step:08d}.png")

    def ended(self, checkpoint: Path, best: BestCheckpoint) -> None:
        """Print how a run ended: its time, the last and the best evaluation, what may come next."""
        told = [f"done in {duration(time.monotonic() - self._start)}"] if self.is_main else []
        if self._held_out:
            told.append(f"held-out {' | '.join(self._held_out)}")
        if best.value is not None:
            told.append(f"best {best.metric} {best.value:.4f} at step {best.step}")
        self.say(" | ".join(told))
        self.say(spelled(f"next: stageline eval or stageline chat `model_path` {checkpoint}"))

    def timeline(
        self,
        step: int,
        measured: Sequence[TimelineEvent],
        ideal: Sequence[TimelineEvent] | None = None,
    ) -> None:
        """Draw the timed step of all ranks, and what the mean times would ideally give."""
        if not self.is_main or not measured:
            return
        from stageline.plotting.figures import save_figure, timeline_figure

        title = f"{self.folder.resolve().name}, step {step}"
        figure = timeline_figure(measured, ideal, title=title)
        save_figure(figure, self.folder / "timeline.png", dpi=120)
        write_trace(measured, self.folder / "timeline.json")
        told = f"timeline of step {step}: {describe_timeline(measured, ideal)}"
        for line in told.splitlines():
            self.say(line, is_detail=line.startswith("rank "))


def duration(seconds: float) -> str:
    """Return minutes and seconds, or hours and minutes, for people."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


def scalars(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the figures; of several one for each rank or layer."""
    numbers: dict[str, float] = {}
    for name, value in figures.items():
        named = {name: value}
        if isinstance(value, list | tuple):
            named = {f"{name}/rank_{rank}": item for rank, item in enumerate(value)}
        elif name.endswith(BY_LAYER):
            plain = name.removesuffix(BY_LAYER)
            named = {f"{plain}/layer_{layer}": item for layer, item in value.items()}
        numbers |= {n: float(item) for n, item in named.items() if isinstance(item, int | float)}
    return numbers


class _Events:
    """TensorBoard's events, told as a tracker is."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import; one rank needs it

        # evaluations at step 0 come before the first step, those at a later start have been made
        purge_step = (start_step + 1 if start_step else 0) if folder.exists() else None
        self.writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)
        self.close = self.writer.close

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)


def show_stages(models: Sequence[Stage], *, group: dist.ProcessGroup | None) -> None:
    """Print layers, parameters and bytes of all stages in a line; every rank calls this."""
    own = []
    for model in models:
        parameters = dict(model.named_parameters())
        tower = getattr(model, "tower_layers", None)
        layers = tower or model.layers
        start = getattr(model, "start", None) if model.stage == 0 else None
        counts = {name: (plain_shape(p).numel(), p.requires_grad) for name, p in parameters.items()}
        place = f"{'tower ' if tower else ''}{layers[0]}-{layers[-1]}"
        notes = (*getattr(model, "notes", ()), *getattr(start, "notes", ()))
        own.append((model.stage, place, tensor_bytes(parameters.values()), counts, notes))
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    stages = sorted(one for part in gathered for one in part)
    for note in dict.fromkeys(note for *_, notes in stages for note in notes):
        terminal.say(note)
    counts = {name: count for *_, own_counts, _ in stages for name, count in own_counts.items()}
    trained = human_count(sum(count for count, is_trained in counts.values() if is_trained))
    total = human_count(sum(count for count, _ in counts.values()))
    of_experts = {name: own[0] for name, own in counts.items() if own[1] and is_expert_lora(name)}
    adapted, num_fused = human_count(sum(of_experts.values())), len(of_experts) // 2
    told = f" ({adapted} on {num_fused} fused weights of experts)" if of_experts else ""
    stages_told = f"in {len(stages)} stages"
    terminal.say(f"model        {total} parameters, {trained} trainable{told}, {stages_told}")
    for stage, layers, size, own_counts, _ in stages:
        number = human_count(sum(count for count, _ in own_counts.values()))
        terminal.say(f"  {f'stage {stage}':<10} layers {layers}: {number}, {human_bytes(size)}")
