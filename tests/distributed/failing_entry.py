"""An entry file for tests that fails, or is stopped, in the way its first argument names."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stageline.distributed.failure import run_entry
from stageline.distributed.failure_record import name_stages
from stageline.distributed.launch import launch_if_needed
from stageline.distributed.process_group import DistributedContext, distributed_context
from stageline.distributed.stop import stop_requested
from stageline.distributed.watchdog import WatchdogRules
from stageline.errors import DataError, UserError


def exchange(context: DistributedContext) -> None:
    """Wait for the previous neighbour, as a stage does."""
    dist.recv(torch.empty(4), group=context.pp_group, group_src=(context.pp_rank - 1))


def ok(context: DistributedContext, folder: Path) -> None:
    dist.all_reduce(torch.ones(1), group=context.pp_group)


def positions(context: DistributedContext, folder: Path) -> None:
    pipeline, stage = (
        dist.get_process_group_ranks(group) for group in (context.pp_group, context.dp_group)
    )
    text = f"{context.dp_rank} {context.pp_rank} {pipeline} {stage}"
    (folder / f"position_{context.rank}").write_text(text)
    dist.barrier()  # the first rank has the store, in which others may still meet


def raise_on_1(context: DistributedContext, folder: Path) -> None:
    if context.rank == 1:
        raise KeyError("boom on purpose")
    if context.rank == 0:
        dist.recv(torch.empty(4), group=context.pp_group, group_src=context.num_ranks - 1)
    exchange(context)


def close_then_raise_on_1(context: DistributedContext, folder: Path) -> None:
    if context.rank == 1:
        dist.destroy_process_group()  # the neighbours lose their connection before the cause is out
        time.sleep(0.7)
        raise KeyError("boom on purpose")
    raise_on_1(context, folder)


def wrapped_on_1(context: DistributedContext, folder: Path) -> None:
    if context.rank == 1:
        try:
            raise IndexError("index 7 is out of range")
        except IndexError as error:
            raise RuntimeError("[Stage 1] failed to run forward: args (...)") from error
    raise_on_1(context, folder)


def raise_on_0(context: DistributedContext, folder: Path) -> None:
    raise KeyError("boom once")


def user_error(context: DistributedContext, folder: Path) -> None:
    raise UserError("--batch-size 7 is wrong on every rank")


def data_error_on_1(context: DistributedContext, folder: Path) -> None:
    if context.rank == 1:
        raise DataError("rows.jsonl:17 is not JSON")
    raise_on_1(context, folder)


def killed_on_1(context: DistributedContext, folder: Path) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise_on_1(context, folder)


def train_until_stopped(context: DistributedContext, folder: Path) -> None:
    """Steps like a trainer: ranks agree at the end of a step whether to stop."""
    for step in range(10_000):
        wants_stop = torch.tensor(float(stop_requested()))
        (folder / f"started_{context.rank}").touch()
        time.sleep(0.02)
        dist.all_reduce(wants_stop, group=context.pp_group)
        if wants_stop > 0:
            time.sleep(0.3 * context.rank)  # one rank saves longer than the other
            (folder / f"saved_{context.rank}").write_text(str(step))
            return


def never_stop(context: DistributedContext, folder: Path) -> None:
    stop_requested()
    (folder / f"started_{context.rank}").touch()
    time.sleep(500)
    time.sleep(500)


def never_stop_in_a_wait(context: DistributedContext, folder: Path) -> None:
    """Both ranks wait for each other inside gloo, where no Python handler runs."""
    stop_requested()
    (folder / f"started_{context.rank}").touch()
    dist.recv(torch.empty(4), group=context.pp_group, group_src=1 - context.pp_rank)


def slow_start(context: DistributedContext, folder: Path) -> None:
    (folder / f"started_{context.rank}").touch()
    exchange(context) if context.rank else time.sleep(500)


def main() -> None:
    mode, folder, num_ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    num_stages = int(sys.argv[4]) if len(sys.argv) > 4 else num_ranks
    rules = WatchdogRules(stop_deadline=float(os.environ.get("STOP_DEADLINE", "120")))
    launch_if_needed(num_ranks, rules=rules)
    with distributed_context(num_ranks=num_stages, device="cpu", timeout=600) as context:
        name_stages([context.pp_rank])
        globals()[mode](context, folder)
        (folder / f"done_{context.rank}").write_text(f"{context}")


if __name__ == "__main__":
    run_entry(main)
