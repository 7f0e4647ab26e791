"""Host memory of the engine: how much it takes, said before it is taken, and how it is pinned."""

import weakref
from collections.abc import Iterable, Sequence

import torch

from stageline.checkpoint.host_memory import available_memory
from stageline.streaming.host_weights import HostWeights, all_homes, page_views

PAGE = 4096  # bytes that are pinned at once
Run = tuple[int, int]  # first address, behind the last


def make_pages(
    hosted_layers: Sequence[HostWeights], pin_model: str, *, on_gpu: bool, owner: object
) -> None:
    """Puts weights where a GPU fetches them quickly.

    Args:
        owner: memory that is registered where it lies is given back when this is gone.

    Raises:
        ValueError: no such way of pinning.
        RuntimeError: the driver refuses to pin.
    """
    if pin_model not in ("alloc", "register", "off"):
        raise ValueError(f"pin_model {pin_model!r} came: 'alloc', 'register' or 'off' was expected")
    if not on_gpu or pin_model == "off":
        return
    if pin_model == "register":
        values = [home.parameter.detach() for home in all_homes(hosted_layers)]
        runs = _register([each for each in values if not each.is_pinned()])
        weakref.finalize(owner, _unregister, runs).atexit = False
        return
    _pin_buffers(hosted_layers)
    placed: set[int] = set()
    for hosted in hosted_layers:
        homes = [home for home in hosted.homes if id(home) not in placed]
        placed |= {id(home) for home in homes}
        values = [home.parameter.detach() for home in homes]
        views = page_views(values, allocate_pinned)
        for home, view, value in zip(homes, views, values, strict=True):
            home.parameter.data = view.copy_(value)


def allocate(num_bytes: int) -> torch.Tensor:
    """Bytes of the host that gradients arrive in."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def allocate_pinned(num_bytes: int) -> torch.Tensor:
    """Bytes that a GPU copies from without the processor."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def host_bytes(hosted_layers: Sequence[HostWeights], optim_dtype: torch.dtype | None) -> int:
    """What weights, their second pages, gradients, their sums and the optimizer's copies take.

    Without the optimizer's own state, which is the optimizer's to choose (AdamW: two more values
    a trained parameter).
    """
    total = 0
    for home in all_homes(hosted_layers):
        count, size = home.parameter.numel(), home.parameter.element_size()
        total += count * size
        if home.parameter.requires_grad:
            wide = torch.empty(0, dtype=optim_dtype or home.parameter.dtype).element_size()
            total += count * (2 * size + 2 * wide)  # back page, staged; sum, master
    return total


def _pin_buffers(hosted_layers: Sequence[HostWeights]) -> None:
    """Those that a pass changes come home, and who starts a copy to other memory waits for it."""
    for buffer in {id(each): each for hosted in hosted_layers for each in hosted.buffers}.values():
        if not buffer.is_pinned():
            buffer.data = buffer.detach().pin_memory()


def _unregister(runs: Sequence[Run]) -> None:
    """Unpins memory; else another model whose memory lies there could not be pinned."""
    torch.cuda.synchronize()  # copies on their way read it
    for start, _ in runs:
        torch.cuda.cudart().cudaHostUnregister(start)


def page_runs(ranges: Iterable[Run]) -> list[Run]:
    """Ranges of addresses as runs of whole pages; those that touch become one.

    Small tensors share pages, and a page is pinned once.
    """
    runs: list[Run] = []
    for start, end in sorted(ranges):
        start, end = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((start, end))
    return runs


def _register(values: Sequence[torch.Tensor]) -> list[Run]:
    """Pins memory where it lies."""
    ends = [(each.data_ptr(), each.numel() * each.element_size()) for each in values]
    done: list[Run] = []
    for run in page_runs((start, start + length) for start, length in ends if length):
        code = int(torch.cuda.cudart().cudaHostRegister(run[0], run[1] - run[0], 0))
        if code != 0:
            _unregister(done)
            raise RuntimeError(
                f"cudaHostRegister returned {code} for {run[1] - run[0]:,} bytes; 0 was expected: "
                "raise the limit of locked memory (ulimit -l), or use pin_model='alloc' or 'off'"
            )
        done.append(run)
    return done


def check_host_memory(
    hosted_layers: Sequence[HostWeights], optim_dtype: torch.dtype | None
) -> None:
    """Refuses to train what would drive the machine out of memory, before anything is taken.

    Raises:
        MemoryError: says what is needed and what there is.
    """
    whole = host_bytes(hosted_layers, optim_dtype)
    weights = sum(
        home.parameter.numel() * home.parameter.element_size() for home in all_homes(hosted_layers)
    )
    there = available_memory()
    if there is not None and whole - weights > there:
        raise MemoryError(
            f"training takes {whole - weights:,} bytes of host memory beside the weights (second "
            f"pages, gradients, their sums, the optimizer's copies; its own state comes on top); "
            f"{there:,} are free: freeze more of the model, train adapters, or take a machine "
            "with more memory"
        )
