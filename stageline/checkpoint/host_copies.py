"""Copies on the host of what training goes on to change, in the same memory at each save."""

import torch


class HostCopies:
    """Keeps a place on the host for each tensor that is saved.

    Fresh memory at each save would be asked for page by page, which takes longer than the copying;
    below a GPU it is page-locked, which is twice as fast. The last copies must be written before
    the next ones are made.
    """

    def __init__(self) -> None:
        self._places: dict[str, torch.Tensor] = {}

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy that stays as it is until `name` is copied again."""
        place = self._places.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._places[name] = place
        return place.copy_(tensor.detach())
