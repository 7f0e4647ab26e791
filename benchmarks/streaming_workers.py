"""The peers of benchmarks/streaming.py: one model, one way of training it each.

A peer has `step(ids) -> loss` and `facts()`; `run_on_gpu` is what the process of one does on a GPU.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from streaming_model import SHAPES, Block, Setup, batch_of, loss_of, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from stageline.streaming.engine import RoundPipe
from stageline.streaming.host_weights import make_host_weights
from stageline.streaming.lanes import Lane
from stageline.streaming.plan import Plan, choose, costs_of
from stageline.streaming.run_config import RoundPipeRunConfig


def adamw(parameters, device: str):
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)


def activation_bytes(setup: Setup, block: Block) -> int:
    """What one block keeps of a micro-batch for its backward pass, asked of autograd."""
    kept: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in block.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = max(1, setup.rows // setup.micro_batches)
    value = torch.randn(
        rows, setup.sequence, SHAPES[setup.size][0], device=setup.device, dtype=setup.dtype
    ).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(value)
    return sum(kept.values())


def plan_of(setup: Setup, model: nn.Sequential) -> Plan:
    """The engine's choice for the budget, with the activations of a block as measured."""
    hosted_layers = make_host_weights(model)
    block = Block(SHAPES[setup.size], lora=setup.lora).to(setup.device, setup.dtype)
    size = activation_bytes(setup, block)
    costs = [dataclasses.replace(cost, activation_bytes=size) for cost in costs_of(hosted_layers)]
    return choose(costs, num_lanes=1, num_microbatches=setup.micro_batches, budget=setup.budget)


class Ours:
    """The streaming engine. One slot: the weights are in device memory for a whole pass."""

    def __init__(self, setup: Setup, *, is_async: bool, one_slot: bool = False) -> None:
        self.setup, self.is_async = setup, is_async
        self.model = make_model(setup, "cpu")
        count = len(self.model)
        self.plan = Plan((), (range(count),)) if one_slot else plan_of(setup, self.model)
        budget = None if one_slot else setup.budget
        is_cuda = setup.device == "cuda"
        self.lane = (
            Lane.streams(torch.device("cuda", 0), budget=budget)
            if is_cuda
            else Lane.cpu(budget=budget)
        )
        self.engine = RoundPipe(self.model, torch.float32, lanes=[self.lane])
        self.optimizer = adamw(self.engine.optim_parameters(), "cpu")
        self.config = RoundPipeRunConfig(num_microbatch=setup.micro_batches, execute_plan=self.plan)

    def step(self, ids: torch.Tensor) -> float:
        loss = self.engine.forward_backward(
            (ids,), label=ids, loss_fn=loss_of(self.setup), run_config=self.config
        )
        self.engine.step(self.optimizer.step, is_async=self.is_async)
        return float(loss)

    def finish(self) -> None:
        self.engine.synchronize()

    def facts(self) -> dict[str, object]:
        recomputed = sum(map(len, self.plan.backward[1:]))
        sizes = [sum(each.nbytes for each in layer.parameters()) for layer in self.model]
        stages = (*self.plan.forward, *self.plan.backward)
        sent = sum(each.nbytes for each in self.model.parameters() if each.requires_grad)
        return {
            "slots": self.plan.num_slots,
            "recomputed": recomputed / len(self.model),
            "up": sum(sizes[layer] for stage in stages for layer in stage),
            "down": sent,
            "pool_peak": self.lane.pool.peak_bytes,
        }


class Recomputed(nn.Module):
    """Keeps the input alone for the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value):
        return checkpoint(self.inner, value, use_reentrant=False)


def recomputed(layer: nn.Module) -> nn.Module:
    return Recomputed(layer) if isinstance(layer, Block) else layer


class Plain:
    """PyTorch, all in device memory."""

    def __init__(self, setup: Setup, *, keeps: bool) -> None:
        self.setup, self.keeps = setup, keeps
        self.model = make_model(setup, setup.device)
        if not keeps:
            self.model = nn.Sequential(*map(recomputed, self.model))
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        is_wide = setup.dtype == torch.float32
        self.masters = (
            self.trained if is_wide else [nn.Parameter(each.float()) for each in self.trained]
        )
        self.optimizer = adamw(self.masters, setup.device)

    def step(self, ids: torch.Tensor) -> float:
        losses = []
        loss_fn = loss_of(self.setup)
        for part in ids.to(self.setup.device).tensor_split(self.setup.micro_batches):
            loss = loss_fn(self.model(part), part)
            loss.backward()
            losses.append(loss.detach())
        self._update()
        return float(sum(losses))

    def _update(self) -> None:
        if self.masters is not self.trained:
            for master, parameter in zip(self.masters, self.trained, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.trained:
            with torch.no_grad():
                torch._foreach_copy_(self.trained, self.masters)

    def finish(self) -> None:
        pass

    def facts(self) -> dict[str, object]:
        return {"recomputed": 0.0 if self.keeps else 1.0, "up": 0, "down": 0}


class Offloaded(Plain):
    """FSDP2 with CPU offload on one GPU.

    Full: float32 values on the host, cast on the device. LoRA: all in 16 bits, since a group of
    FSDP2 has one dtype and frozen weights in 32 would not fit.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.device != "cuda":
            raise RuntimeError("FSDP2 with CPU offload needs a GPU: there is nothing to offload")
        from torch.distributed import init_process_group
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
        init_process_group("cuda:nccl,cpu:gloo")
        self.setup, self.keeps = setup, False
        wide = setup.dtype if setup.lora else torch.float32
        self.model = nn.Sequential(*map(recomputed, make_model(setup, "cpu").to(wide)))
        policies = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=setup.dtype),
            "offload_policy": CPUOffloadPolicy(),
        }
        for layer in self.model:
            fully_shard(layer, **policies)
        fully_shard(self.model, **policies)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.masters = self.trained
        self.optimizer = adamw(self.masters, "cpu")

    def facts(self) -> dict[str, object]:
        num_bytes = sum(each.numel() * each.element_size() for each in self.model.parameters())
        sent = sum(each.numel() * each.element_size() for each in self.trained)
        count = self.setup.micro_batches  # forward and backward of each one anew
        return {"recomputed": 1.0, "up": 2 * num_bytes * count, "down": sent * count}


class Original:
    """`roundpipe` 0.1.1 through its public API, where it is installed."""

    def __init__(self, setup: Setup) -> None:
        import roundpipe

        self.setup = setup
        self.engine = roundpipe.RoundPipe(make_model(setup, "cpu"), optim_dtype=torch.float32)
        self.optimizer = adamw(self.engine.optim_parameters(), "cpu")
        self.config = roundpipe.RoundPipeRunConfig(num_microbatch=setup.micro_batches)

    def step(self, ids: torch.Tensor) -> float:
        loss = self.engine.forward_backward(
            input_args=(ids,), label=ids, loss_fn=loss_of(self.setup), run_config=self.config
        )
        self.engine.step(self.optimizer.step)
        return float(loss)

    def finish(self) -> None:
        self.engine.synchronize()

    def facts(self) -> dict[str, object]:
        return {"recomputed": 1.0}


PEERS = {
    "ours_async": lambda setup: Ours(setup, is_async=True),
    "ours_sync": lambda setup: Ours(setup, is_async=False),
    "ours_one_slot": lambda setup: Ours(setup, is_async=True, one_slot=True),
    "plain_checkpoint": lambda setup: Plain(setup, keeps=False),
    "plain": lambda setup: Plain(setup, keeps=True),
    "fsdp2_offload": Offloaded,
    "roundpipe": Original,
}


def run_on_gpu(name: str, setup: Setup) -> dict[str, object]:
    """Steps without a wait between them, timed from the return of the third to that of the last.

    An asynchronous update of the last step is still on its way then, as one was in the beginning.
    """
    torch.cuda.set_device(0)
    peer = PEERS[name](setup)
    # equal arithmetic: sums of matrices in float32, whatever a peer sets for itself
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    losses = [peer.step(batch_of(setup, step)) for step in range(2)]
    peer.finish()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    losses.append(peer.step(batch_of(setup, 2)))
    began = time.perf_counter()
    losses += [peer.step(batch_of(setup, 3 + step)) for step in range(setup.steps)]
    seconds = (time.perf_counter() - began) / setup.steps
    peer.finish()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    if setup.trace:
        _write_trace(peer, setup)
    status = Path("/proc/self/status").read_text()
    host = int(status.split("VmHWM:")[1].split()[0]) * 1024
    found = {"seconds": seconds, "peak": peak, "host": host, "losses": losses}
    return {**found, "trace": setup.trace, **peer.facts()}


def _write_trace(peer, setup: Setup) -> None:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds) as profiler:
        for step in range(2):  # the turn from one step to the next is in it
            peer.step(batch_of(setup, step))
        peer.finish()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(setup.trace)
