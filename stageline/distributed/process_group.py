"""The process group of a run and its mesh: axis "dp" of replicas, axis "pp" of a pipeline's ranks.

Rank = dp_rank * num_ranks + pp_rank, so that neighbours of a pipeline are neighbours on a machine.
A single process gets a group of its own, so that one stage runs the same code as many.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stageline import progress
from stageline.device import VISIBLE, accelerators, is_accelerator
from stageline.distributed.stop import begin_to_end, stop_code
from stageline.errors import UserError
from stageline.hub import name_of

LONGEST_FETCH = timedelta(days=2)  # that ranks wait for one whose weights come from a hub


def explain_placement(machine_of_rank: Sequence[int], *, num_ranks: int) -> str:
    """Name the pipelines that cross machines, where the network is slower.

    Args:
        machine_of_rank: the machine's number of each rank, in order of ranks.
    """
    starts = range(0, len(machine_of_rank), num_ranks)
    pipelines = [set(machine_of_rank[start : start + num_ranks]) for start in starts]
    crossing = [str(replica) for replica, machines in enumerate(pipelines) if len(machines) > 1]
    text = f"{len(set(machine_of_rank))} machines, {len(pipelines)} pipelines of {num_ranks} ranks"
    if not crossing:
        return f"{text}: no pipeline crosses machines."
    return (
        f"{text}: pipelines {', '.join(crossing)} cross machines, where the network is slower. "
        "Stages that divide the processes of a machine evenly (`num_stages`) avoid that."
    )


@dataclass(frozen=True)
class DistributedContext:
    """Place of this process among the processes and devices of a run; by default it is alone.

    Attributes:
        rank, world_size: among all processes of the run.
        num_replicas, dp_rank: data-parallel copies of the pipeline, and which one this is.
        num_ranks, pp_rank: processes of one pipeline, and which one this is.
        mesh: replicas x ranks of a pipeline; None: no other process is connected.
        device: of this process, and of the tensors that ranks exchange.
        channels: of this rank, see `open_channels`; empty where one group is enough.
        lanes: the devices that stages stream through; empty: they compute on `device`.
    """

    rank: int = 0
    world_size: int = 1
    num_replicas: int = 1
    dp_rank: int = 0
    num_ranks: int = 1
    pp_rank: int = 0
    mesh: Any = None
    device: torch.device = torch.device("cpu")
    channels: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    lanes: tuple[torch.device, ...] = ()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices on which this process computes."""
        return self.lanes or (self.device,)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The processes of this pipeline, in order."""
        return self.mesh.get_group("pp")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The processes that hold the same stages."""
        return self.mesh.get_group("dp")


@contextmanager
def distributed_context(
    *,
    num_ranks: int,
    device: str = "auto",
    timeout: float = 600.0,
    pairs: Sequence[tuple[int, int]] = (),
) -> Iterator[DistributedContext]:
    """Join the processes of the run, and leave them when the block ends without an exception.

    Args:
        num_ranks: processes of one pipeline; the number of processes is a multiple of it.
        device: see `stageline.device.accelerators`.
        timeout: seconds that one exchange may take.
        pairs: (from, to) of a pipeline's ranks whose transfers overlap others; the same everywhere.

    Raises:
        UserError: processes and ranks do not fit, or there are too few devices.
    """
    # torchrun sets these; without it there is one process
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % num_ranks:
        raise UserError(
            f"{world_size} processes can't hold pipelines of {num_ranks} ranks: their number "
            f"must be a multiple of that, because each rank has a process of its own. "
            f"Set `num_stages` or torchrun --nproc-per-node accordingly."
        )
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    chosen = choose_device(device, local_rank=local_rank, local_world_size=local_world_size)
    _init_group(rank, world_size, chosen, timeout=timeout)
    limit = timedelta(seconds=timeout)
    # groups that wait no longer than the run does: those of a mesh itself wait for half an hour
    ranks = torch.arange(world_size).view(-1, num_ranks)
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=limit)[0]
        for rows in (ranks.T, ranks)
    ]
    mesh = DeviceMesh.from_group(groups, chosen.type, mesh=ranks, mesh_dim_names=("dp", "pp"))
    context = DistributedContext(
        rank=rank,
        world_size=world_size,
        num_replicas=world_size // num_ranks,
        dp_rank=mesh.get_local_rank("dp"),
        num_ranks=num_ranks,
        pp_rank=mesh.get_local_rank("pp"),
        mesh=mesh,
        device=chosen,
        channels=open_channels(num_ranks, () if chosen.type == "cpu" else pairs, timeout=limit),
    )
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # several machines
        machines: list[int] = [0] * context.world_size
        dist.all_gather_object(machines, int(os.environ["GROUP_RANK"]))
        if context.is_main:
            print(explain_placement(machines, num_ranks=context.num_ranks), flush=True)
    warm_up(context)
    try:
        yield context
    except SystemExit as error:
        raise RuntimeError(
            f"sys.exit({error.code!r}) was called in the middle of the run, which the other ranks "
            "continue: return from main, or raise an error"
        ) from error
    # not in a `finally`: after an exception closed sockets would make the neighbours report first
    dist.barrier()
    # all ranks learn the exit code after a signal to one; what they had to save is saved
    code = torch.tensor(stop_code())
    dist.all_reduce(code, op=dist.ReduceOp.MAX)
    begin_to_end(int(code))
    dist.destroy_process_group()


def open_channels(
    num_ranks: int, pairs: Sequence[tuple[int, int]], *, timeout: timedelta
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for each direction between two ranks of a pipeline: (from, to) -> what carries it.

    All transfers of a rank in one NCCL group come one after the other, whatever their peers: a
    receive that waits would hold its sends up, and ranks that all wait for each other would hang.
    gloo keeps directions apart by itself, so a run on CPUs opens none.

    Args:
        pairs: in the order in which all processes of the run make the groups.

    Returns:
        Those that this process is part of.
    """
    pipelines = torch.arange(dist.get_world_size()).view(-1, num_ranks)
    found = {}
    for pair in pairs:
        members = pipelines[:, list(pair)].tolist()
        group, _ = dist.new_subgroups_by_enumeration(members, timeout=timeout)
        if group is not None:
            found[pair] = group
    return found


def stage_devices(asked: str = "auto") -> list[torch.device]:
    """Return the devices that stages compute on, or stream through: all accelerators or the CPU."""
    found = accelerators(asked)
    if found and not is_accelerator(found[0]):
        raise UserError(
            "`device` mps cannot run a model in stages: it has no streams and no float64. Use "
            "`device` cpu, or a whole model placed by a device_map."
        )
    return found or [torch.device("cpu")]


def choose_device(device: str, *, local_rank: int, local_world_size: int) -> torch.device:
    """Return the device of one process.

    Raises:
        UserError: there are fewer accelerators than processes on this machine, and they were asked
            for, or "auto" where there is one: "auto" never falls back to the CPU next to a GPU.
    """
    found = stage_devices(device)
    kind = found[0].type
    if kind == "cpu":
        return found[0]
    if len(found) < local_world_size:
        raise UserError(
            f"`device` {device}: this machine shows {len(found)} devices of the kind {kind} for "
            f"{local_world_size} processes. Use fewer stages, let each process see all devices of "
            f"its machine ({VISIBLE.get(kind, 'its variable')}, or what a scheduler sets for each "
            "task), or take `device` cpu."
        )
    return found[local_rank]


def take_own_devices(device: str, num_devices: int | None, *, index: int, count: int) -> None:
    """Limit this process to its share of the accelerators, before it uses any.

    Args:
        device: see `stageline.device.accelerators`.
        num_devices: of each share; None: as many as there are for all.
        index, count: place of this process among those of the run, each of which holds a model.
    """
    found = accelerators(device)
    if count == 1 or not found:
        return
    kind = found[0].type
    if kind not in VISIBLE:
        raise UserError(
            f"devices of the kind {kind} cannot be dealt out to processes, only those of "
            f"{', '.join(VISIBLE)}. Take `device` cpu, or one process with one device."
        )
    shown = [name.strip() for name in os.environ.get(VISIBLE[kind], "").split(",") if name.strip()]
    names = shown or [str(one.index) for one in found]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", count))  # processes of this machine
    each = num_devices or len(names) // here
    if each * here > len(names) or each == 0:
        raise UserError(
            f"{here} replicas with {max(each, 1)} devices each, and this machine shows "
            f"{len(names)}. Lower `num_replicas` or `num_devices`, look at {VISIBLE[kind]}, or "
            "take `device` cpu."
        )
    first = int(os.environ.get("LOCAL_RANK", index)) * each
    os.environ[VISIBLE[kind]] = ",".join(names[first : first + each])


def wait_for_weights(folder: str | Path | None) -> None:
    """Wait for ranks that still fetch weights from a hub, longer than an exchange may take.

    Args:
        folder: of the weights; if it is in no cache of a hub, no rank waits.
    """
    is_fetched = folder is not None and name_of(folder) is not None
    if is_fetched and dist.is_initialized() and dist.get_world_size() > 1:
        with progress.doing("weights of other stages", is_waiting=True):
            dist.barrier(group=dist.new_group(backend="gloo", timeout=LONGEST_FETCH))


def warm_up(context: DistributedContext) -> None:
    """Open the connections of this pipeline in a fixed order.

    They are otherwise made at the first exchange of each pair, inside a schedule, where two pairs
    that open at the same time have deadlocked.
    """
    total = torch.ones((), device=context.device)
    dist.all_reduce(total, group=context.pp_group)
    assert int(total) == context.num_ranks
    last = context.num_ranks - 1
    pairs = [(stage, stage + 1) for stage in range(last)]
    if last > 1:
        pairs.append((last, 0))  # schedules with several stages a rank go round
    directions = [one for low, high in pairs for one in ((low, high), (high, low))]
    opened = [(direction, context.pp_group) for direction in directions]
    for (source, target), group in (*opened, *context.channels.items()):
        value = torch.full((), float(context.pp_rank), device=context.device)
        if context.pp_rank == source:
            dist.send(value, dist.get_global_rank(context.pp_group, target), group=group)
        elif context.pp_rank == target:
            dist.recv(value, dist.get_global_rank(context.pp_group, source), group=group)
            assert int(value) == source


def group_backend(device: torch.device) -> str:
    """Return the backend of a process group; gloo carries small integers without the GPU."""
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _init_group(rank: int, world_size: int, device: torch.device, *, timeout: float) -> None:
    if is_accelerator(device):
        torch.get_device_module(device).set_device(device)
        # Matrix products are full float32 by default; convolutions (vision towers) then are too.
        torch.backends.cudnn.allow_tf32 = False
        # sends and receives are put into one order by hand; NCCL would warn of each pair
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            group_backend(device),
            store=meet(rank, world_size, limit),
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=device if is_accelerator(device) else None,
        )
    except (RuntimeError, OSError) as error:  # torch's own error is a RuntimeError
        if not re.search("EADDRINUSE|address already in use", str(error), re.IGNORECASE):
            raise
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        raise UserError(
            f"port {port} of {address} (MASTER_PORT) is in use by another program. Choose another "
            "MASTER_PORT, or start the run without torchrun, which finds a free one."
        ) from error


def meet(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store that the ranks exchange their addresses in.

    torchrun keeps one store over its restarts, and torch writes addresses under the same names each
    time (pytorch issues 135712, 167288): each start gets names of its own.
    """
    if world_size == 1 and "MASTER_ADDR" not in os.environ:
        return dist.HashStore()  # a lone process needs no address to meet at
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


_BEHIND = 1000  # steps; none is loaded so late


class LargestOfReplicas:
    """The largest of a number that each replica has of a step, for data workers.

    They have no process group, so it goes through the store that the ranks met at; each process
    connects by itself. Every rank of a replica has the same number.

    Args:
        name: the same on all ranks, and of no other loader or earlier start.
        seconds: timeout of the wait for the other replicas.
    """

    def __init__(self, name: str, *, rank: int, size: int, seconds: float) -> None:
        self._name, self._rank, self._size, self._seconds = name, rank, size, seconds
        self._store: tuple[int, dist.Store] | None = None

    def __call__(self, step: int, number: int) -> int:
        if self._store is None or self._store[0] != os.getpid():  # forked
            # a store of its own: another thread may wait in the group's
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            limit = timedelta(seconds=self._seconds)
            made = dist.TCPStore(address, port, wait_for_workers=False, timeout=limit)
            self._store = os.getpid(), made
        store = self._store[1]
        store.set(self._key(step, self._rank), str(number))
        store.delete_key(self._key(step - _BEHIND, self._rank))
        return max(int(store.get(self._key(step, rank))) for rank in range(self._size))

    def _key(self, step: int, rank: int) -> str:
        return f"stageline/{self._name}/{step}/{rank}"
