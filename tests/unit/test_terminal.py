"""Terminal output of a run: few lines before its first step, a whole bar, lines in a pipe."""

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
import warnings
from types import SimpleNamespace

import pytest

from stageline.distributed.terminal import MOST_LINES, Terminal, terminal
from stageline.training.run_log import RunLog, StepRecord


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The process's own terminal, as a new process has it."""
    monkeypatch.setattr(terminal, "__dict__", vars(Terminal()))


def record(step, **other):
    figures = dict(
        loss=2.5,
        learning_rate=0.5,
        grad_norm=2.0,
        num_tokens=300,
        num_targets=30,
        num_samples=3,
        seconds=0.5,
        peak_memory_bytes=(2**30, 2**29),
    )
    return StepRecord(step=step, **{**figures, **other})


def small_run(folder):
    """A run of four steps, in which others than the log print and warn."""
    handler = logging.StreamHandler()  # keeps the stream that is there before the bar
    logger = logging.getLogger("somebody.else")
    logger.addHandler(handler)
    log = RunLog(folder, total_steps=4)
    log._bar.mininterval = 0
    log.say("before the first step")
    for step in (1, 2, 3):
        log.log_step(record(step, bubble=0.3 if step == 2 else None))
        warnings.warn(f"warned {step}", stacklevel=1)
        logger.warning(f"logged {step}")
        print(f"printed {step}")
    log.say("two\nlines")
    log.log_step(record(4))
    log.close()
    print("after the run")


def written_by(run, folder, *, is_terminal):
    """Return what a forked process writes to a terminal of 100 columns, or into a pipe."""
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number in (1, 2):
                os.dup2(writer, number)
            sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
            warnings.simplefilter("always")
            warnings.showwarning = lambda text, *_: print(f"warning: {text}", file=sys.stderr)
            run(folder)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writer)
    found = b""
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:  # a terminal whose other end is gone
            break
        if not piece:
            break
        found += piece
    os.close(reader)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, found.decode()
    return found.decode()


def screen(text):
    """Return the rows that a terminal shows at the end."""
    rows, column = [""], 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.|\n|\r", text):
        if part == "\n":
            rows.append("")
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            rows[-1] = rows[-1][:column]
        else:
            assert len(part) == 1, f"the terminal of this test knows no {part!r}"
            rows[-1] = rows[-1][:column] + part + rows[-1][column + 1 :]
            column += 1
    return [row.rstrip() for row in rows]


def test_on_a_terminal_a_bar_runs_below_whole_lines(tmp_path):
    rows = screen(written_by(small_run, tmp_path, is_terminal=True))
    said = [
        f"{what} {step}" for step in (1, 2, 3) for what in ("warning: warned", "logged", "printed")
    ]
    others = [row for row in rows if row and "%|" not in row]
    assert others == ["before the first step", *said, "two", "lines", "after the run"]
    (bar,) = [row for row in rows if "%|" in row]
    assert bar.startswith("100%|") and "4/4 | eta 00:00, loss 2.5000 | 600 tok/s" in bar
    assert bar.endswith("bubble 30% | mem 1.0/0.5 GiB"), "the bubble is the last one measured"
    kept = (tmp_path / "run.log").read_text()
    assert "step 1/4 | loss 2.5000" in kept and "step 4/4" in kept, "the lines of a pipe"


def test_in_a_pipe_there_are_plain_lines(tmp_path):
    text = written_by(small_run, tmp_path, is_terminal=False)
    assert "\r" not in text and "\x1b" not in text and "%|" not in text
    lines = text.splitlines()
    assert [line.split(" |")[0] for line in lines if line.startswith("step")] == [
        f"step {step}/4" for step in (1, 2, 3, 4)
    ]
    assert {"before the first step", "warning: warned 2", "logged 3", "two", "lines"} <= set(lines)


def other_rank(folder):
    os.environ["RANK"] = "1"
    log = RunLog(folder, total_steps=4, context=SimpleNamespace(is_main=False))
    log.say("said")
    terminal.say("said")
    warnings.warn("of rank 1", stacklevel=1)
    log.close()


def test_other_ranks_say_nothing_and_warn(tmp_path):
    assert screen(written_by(other_rank, tmp_path, is_terminal=True)) == ["warning: of rank 1", ""]


def test_few_lines_come_before_the_first_step(tmp_path, capsys):
    terminal.begin_quietly()
    said = [f"line {number}" for number in range(8)]
    for line in said:
        terminal.say(line)  # before there is a folder
    log = RunLog(tmp_path, total_steps=2)
    more = [*said, "\n".join(f"row {number}" for number in range(8)), "short"]
    for text in more:
        log.say(text)
    log.say("never shown", is_detail=True)
    log.log_step(record(1))
    log.say("later\n" * 20)
    log.close()
    shown = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(shown) if line.startswith("step 1/"))
    assert first == MOST_LINES and shown[:15] == [*said, *said[:7]]
    assert shown[15] == f"10 more lines are in {tmp_path / 'run.log'}"
    assert shown.count("later") == 20, "no limit after the first step"
    kept = [line.partition(" ")[2] for line in (tmp_path / "run.log").read_text().splitlines()]
    wanted = [*said, *said, *more[8].splitlines(), "short", "never shown"]
    assert kept[: len(wanted)] == wanted and kept[len(wanted)].startswith("step 1/2")
