"""A small training run through the real entry file, for fault tests.

`Job.fork` forks ranks of this process, which has imported everything: two seconds instead of ten.
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stageline.checkpoint.layout import verify
from stageline.distributed import failure_record
from stageline.distributed.launch import END_SIGNAL, SECONDS_TO_END, first_failure
from stageline.plotting import figures, pictures
from tests.helpers import faults
from tests.helpers.fresh_progress import forget_progress
from tests.helpers.house import ROOT, enter_house, prepare_house
from tests.helpers.plans import learn_plans, leave_plans
from tests.helpers.ports import free_port
from tests.helpers.ranks import keep_to_a_core, spare_collections
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

OPTIONS = (
    "--dataset jsonl --prompt question --prompt-fn fill --image-token none "
    "--collate-fn sft --batch-size 8 --total-steps 12 --device cpu "
    "--max-token-num 64 --learning-rate 1e-2 --eval-samples 0 --save-steps 2 --timeline-step 0"
).split()
# whether forked runs draw their pictures: a third of a short run, and hardly a test looks at them
draws = False
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Finished:
    """The result of a process that ended.

    Attributes:
        seconds: from its start to its end.
    """

    code: int
    out: str
    err: str
    seconds: float


class Job:
    """A folder with a tiny model, its tokenizer and 40 rows of unequal lengths.

    Args:
        num_layers: of the model; no fewer than a run has stages. With two of them a step of 8 rows
            has 2 micro-batches, else 4.
        make_model: otherwise a caller puts a model with its processor into `model`.
    """

    micro_batch_size = 2

    def __init__(
        self,
        folder: Path,
        *,
        family: str = "llama",
        tied: bool = False,
        num_rows: int = 40,
        num_layers: int = 2,
        make_model: bool = True,
    ) -> None:
        self.folder = folder
        self.family = family
        if num_layers == 2:
            self.micro_batch_size = 4
        self.model = folder / "model"
        self.rows = folder / "rows.jsonl"
        if make_model:
            _save_model(self.model, family, tied=tied, num_layers=num_layers)
        rows = [
            {"id": str(i), "question": f"{i}?", "answer": "!" * (1 + i % 7)}
            for i in range(num_rows)
        ]
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(
        self, name: str, *options: str | Path | int, torchrun: tuple[str | int, ...] = ()
    ) -> list[str]:
        """Return the command line of a run into folder `name`.

        Args:
            torchrun: number of processes and further options of torchrun; by default our launcher
                starts them.
        """
        launcher = (*TORCHRUN, *torchrun) if torchrun else ()
        paths = ("--model-path", self.model, "--dataset-path", self.rows)
        model = ("--train-model", self.family, "--micro-batch-size", self.micro_batch_size)
        words = [sys.executable, *launcher, ROOT / "train_pp.py", *model, *OPTIONS, *paths]
        return list(map(str, [*words, "--output-dir", self.folder / name, *options]))

    def fork(
        self,
        name: str,
        *options: str | Path | int,
        ranks: int = 2,
        chaos: str = "",
        waits: bool = False,
        timeout: float = 60,
    ) -> Finished:
        """Runs to the end in forked ranks, with one stage each unless `options` say otherwise.

        Args:
            waits: for saves, so that a fault in a later step finds them published.

        Its code is that of the first rank that failed; 0 if none did.
        """
        more = ("--sync-save",) if waits else ()
        run = self.start_forked(name, *options, *more, ranks=ranks, chaos=chaos)
        return run.wait(timeout)

    def train(self, name: str, *options: str | Path | int, **more: Any) -> Finished:
        """Call `fork`; the run must not fail."""
        done = self.fork(name, *options, **more)
        assert done.code == 0, done.out[-2000:] + done.err[-4000:]
        return done

    def resume(self, name: str, *options: str | Path | int, step: int = 6, **more: Any) -> str:
        """Run `NAME-resumed` from a checkpoint of run `name`; return its name.

        A kill leaves no other state than a run that continues: checkpoints are written alike.
        """
        source = self.folder / name / "checkpoints" / f"step-{step:08d}"
        done = self.train(f"{name}-resumed", *options, "--resume", source, **more)
        assert f"{step} of " in done.out and "steps are done" in done.out, done.out
        rest = {k: loss for k, loss in self.losses(name).items() if k > step}
        assert self.losses(f"{name}-resumed").keys() == rest.keys()
        return f"{name}-resumed"

    def start_forked(
        self, name: str, *options: str | Path | int, ranks: int = 2, chaos: str = ""
    ) -> "ForkedRun":
        """Start a run like `fork`, without waiting."""
        words = self.command(name, "--num-stages", ranks, *options)[1:]
        return ForkedRun(words, ranks=ranks, chaos=chaos)

    def losses(self, name: str) -> dict[int, float]:
        """Step -> loss as the log says it; of a step that was run again the last."""
        return {record["step"]: record["loss"] for record in self.records(name)}

    def records(self, name: str, kind: str = "train") -> list[dict[str, Any]]:
        """Return the log's records of steps (`train`) or of evaluations (`eval`)."""
        lines = (self.folder / name / "log.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def checkpoints(self, name: str) -> list[str]:
        """Return names of what is called a checkpoint, in order."""
        return sorted(p.name for p in (self.folder / name / "checkpoints").glob("step-????????"))


def _save_model(folder: Path, family: str, *, tied: bool, num_layers: int) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = tiny_config(family, tied=tied, vocab_size=len(tokenizer), num_hidden_layers=num_layers)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the safetensors files of a checkpoint, which verifies; of any number of ranks.

    Names begin with the folder below the checkpoint.
    """
    verify(folder)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        kind = path.parent.name if path.parent != folder else ""
        for name, value in load_file(path).items():
            assert f"{kind}/{name}" not in found, "saved twice"
            found[f"{kind}/{name}"] = value
    return found


def assert_same_tensors(ours: Path, theirs: Path) -> None:
    """Check that two checkpoints hold the same, to the bit."""
    made, expected = saved_tensors(ours), saved_tensors(theirs)
    assert made.keys() == expected.keys()
    assert [name for name in made if not torch.equal(made[name], expected[name])] == []


class ForkedRanks:
    """A stand-in of torch's agent for forked ranks: when one fails it ends the others.

    Args:
        folder: takes the error files of the ranks.

    Attributes:
        pids: rank -> process, of those that have not ended.
        ended: rank -> exit code, in the order in which ranks ended; a signal is negative.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self._deadline = float("inf")
        self.port = free_port()
        for rank in range(num_ranks):
            (folder / str(rank)).mkdir(parents=True)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that the agent sets for a rank; called by the rank itself."""
        count = str(self.num_ranks)
        told = {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **{"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count},
            **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)},
        }
        if self.num_ranks > 1:  # a lone process reports by itself
            told["TORCHELASTIC_ERROR_FILE"] = str(self.folder / str(rank) / "error.json")
            told[failure_record.LAUNCHER] = str(os.getppid())
        return told

    def is_running(self) -> bool:
        """Whether some rank has not ended."""
        for rank, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[rank]
                self.ended[rank] = os.waitstatus_to_exitcode(status)
        if any(self.ended.values()) and self._deadline == float("inf"):
            self._deadline = time.monotonic() + SECONDS_TO_END
            self.kill(END_SIGNAL)
        if time.monotonic() > self._deadline:
            self.kill(signal.SIGKILL)
        return bool(self.pids)

    def kill(self, signum: int) -> None:
        """Sends a signal to the ranks that are left."""
        for pid in self.pids.values():
            os.kill(pid, signum)

    def first_failure(self) -> failure_record.FailureRecord | None:
        """Return the failure that the launcher reports."""
        codes = {rank: code for rank, code in self.ended.items() if code}
        return first_failure(self.folder, codes, num_ranks=self.num_ranks)


class ForkedRun:
    """A run in forked ranks, below `ForkedRanks`.

    Attributes:
        pids: rank -> process, of those that have not ended.
        codes: exit codes in the order in which ranks ended; a signal is negative.
    """

    def __init__(self, words: list[str], *, ranks: int, chaos: str = "") -> None:
        self.num_ranks = ranks
        self.started_at = time.monotonic()
        self._files = tempfile.TemporaryDirectory()
        folder = Path(self._files.name)
        prepare_house()
        learn_plans()
        sys.stdout.flush()
        sys.stderr.flush()
        self._run_folder = None
        if "--output-dir" in words:
            self._run_folder = Path(words[words.index("--output-dir") + 1])
            failure_record.tell_run_folder(self._run_folder)  # the launcher does this at its start
            failure_record._Run.folder = None
        self._ranks = ForkedRanks(folder / "agent", ranks)
        self.pids = self._ranks.pids
        for rank in range(ranks):
            self.pids[rank] = _fork_rank(words, rank, self._ranks, chaos, folder)

    @property
    def codes(self) -> list[int]:
        return list(self._ranks.ended.values())

    def is_running(self) -> bool:
        """Whether some rank has not ended."""
        return self._ranks.is_running()

    def wait(self, timeout: float = 60) -> Finished:
        """Waits until all ranks have ended; its code is that of the first that failed.

        Raises:
            AssertionError: some still run after `timeout` seconds; they are killed.
        """
        deadline = time.monotonic() + timeout
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(0.02)
        late = dict(self.pids)
        for pid in late.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        seconds = time.monotonic() - self.started_at
        out, err = (self.text(kind) for kind in ("out", "err"))
        assert not late, f"ranks {sorted(late)} still run after {timeout} s:\n{out}\n{err}"
        failure_record._Run.folder = self._run_folder
        first, code = None, self.codes[0]
        if self.num_ranks > 1:
            first = self._ranks.first_failure()
            code = first.code if first else 0
        if first is not None:
            failure_record.write_first(first)
            err += first.report() if first.message else ""
        failure_record._Run.folder = None
        self._files.cleanup()
        return Finished(code, out, err, seconds)

    def text(self, kind: str) -> str:
        """Return what the ranks have written so far, in their order; of kind "out" or "err"."""
        files = [Path(self._files.name, f"{rank}.{kind}") for rank in range(self.num_ranks)]
        return "".join(file.read_text() for file in files if file.exists())


def _fork_rank(words: list[str], rank: int, ranks: ForkedRanks, chaos: str, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid

    def prepare() -> None:
        os.environ.update(ranks.environment(rank))
        os.environ.update(faults.environment(chaos))
        if ranks.num_ranks > 1:
            keep_to_a_core(rank)
        tempfile.tempdir = str(folder)  # ranks of the next run must not read what these leave

    run_and_exit(words, [folder / f"{rank}.{kind}" for kind in ("out", "err")], prepare)


def run_and_exit(words: list[str], files: Sequence[Path], prepare: Callable[[], None]) -> NoReturn:
    """Runs an entry file in a process that was just forked, and ends it.

    Args:
        words: the file, its options; or `-m`, a module, its options.
        files: take what it writes to stdout and stderr.
        prepare: called first, its output goes to them too.
    """
    spare_collections()
    try:
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), number)
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
        prepare()
        if not draws:
            figures.plot_loss = lambda *_, **__: None
            figures.save_figure = pictures.save_figure = lambda figure, path, **_: path.touch()
        forget_progress()
        sys.argv = words[1:] if words[0] == "-m" else words
        torch.set_num_threads(1)  # threads of before are not in the fork
        enter_house()
        faults.arm()
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            if not os.environ.get(faults.VARIABLE):  # a fault may be in what writes files
                leave_plans()
        finally:
            os._exit(code)


EVALUATION = (
    "--dataset jsonl --dataset.test_size 1.0 --image-token none --device cpu --max-new-tokens 6 "
    "--batch-size 4 --bootstrap.resamples 10"
).split()
GENERATE = "--model generate --metric exact_match --prompt question --prompt-fn fill".split()


def evaluated(job: Job, folder: Path, *options: object, ranks: int = 1) -> dict[str, dict]:
    """id -> what evaluate.py wrote about a row; later options win."""
    paths = ("--model-path", job.model, "--dataset-path", job.rows, "--output-dir", folder)
    words = [ROOT / "evaluate.py", *EVALUATION, *paths, *options]
    done = ForkedRun(list(map(str, words)), ranks=ranks).wait(200)
    assert done.code == 0, done.out[-2000:] + done.err[-4000:]
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    records = {record["id"]: record for record in map(json.loads, lines)}
    assert len(records) == len(lines), "a row comes twice"
    return records
