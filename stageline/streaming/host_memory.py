"""Host memory of the engine: how much it takes, said before it is taken, and how it is pinned."""

from collections.abc import Sequence

import torch

from stageline.streaming.shelf import Shelf, all_homes, page_views


def make_pages(shelves: Sequence[Shelf], pin_model: str, *, on_gpu: bool) -> None:
    """Puts weights where a GPU fetches them quickly.

    Raises:
        ValueError: no such way of pinning.
        RuntimeError: the driver refuses to pin.
    """
    if pin_model not in ("alloc", "register", "off"):
        raise ValueError(f"pin_model {pin_model!r} came: 'alloc', 'register' or 'off' was expected")
    if not on_gpu or pin_model == "off":
        return
    placed: set[int] = set()
    for shelf in shelves:
        homes = [home for home in shelf.homes if id(home) not in placed]
        placed |= {id(home) for home in homes}
        values = [home.parameter.detach() for home in homes]
        if pin_model == "alloc":
            views = page_views(values, allocate_pinned)
            for home, view, value in zip(homes, views, values, strict=True):
                home.parameter.data = view.copy_(value)
        else:
            for value in values:
                _register(value)


def allocate(num_bytes: int) -> torch.Tensor:
    """Bytes of the host that gradients arrive in."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def allocate_pinned(num_bytes: int) -> torch.Tensor:
    """Bytes that a GPU copies from without the processor."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def host_bytes(shelves: Sequence[Shelf], optim_dtype: torch.dtype | None) -> int:
    """What weights, their second pages, gradients, their sums and the optimizer's copies take.

    Without the optimizer's own state, which is the optimizer's to choose (AdamW: two more values
    a trained parameter).
    """
    total = 0
    for home in all_homes(shelves):
        count, size = home.parameter.numel(), home.parameter.element_size()
        total += count * size
        if home.parameter.requires_grad:
            wide = torch.empty(0, dtype=optim_dtype or home.parameter.dtype).element_size()
            total += count * (2 * size + 2 * wide)  # back page, staged; sum, master
    return total


def _register(value: torch.Tensor) -> None:
    """Pins memory where it lies."""
    num_bytes = value.numel() * value.element_size()
    code = torch.cuda.cudart().cudaHostRegister(value.data_ptr(), num_bytes, 0)
    if int(code) != 0:
        raise RuntimeError(
            f"cudaHostRegister returned {int(code)} for {num_bytes:,} bytes; 0 was expected: raise "
            "the limit of locked memory (ulimit -l), or use pin_model='alloc' or 'off'"
        )
