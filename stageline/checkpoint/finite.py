"""Refuses weights that are inf or nan, before they are written and after they were read."""

from collections.abc import Callable, Iterable, Mapping

import torch

from stageline.errors import NonFiniteError

MOST_NAMED = 3


def check_finite(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    what: str,
    cure: str,
    place_of: Callable[[str], str] = lambda name: "",
) -> None:
    """Looks at all floating tensors; one pass over each.

    Args:
        what: what they are: "weights of step 200".
        cure: what to do about it, a sentence.
        place_of: name -> where it comes from, such as a file.

    Raises:
        NonFiniteError: names the first ones that are not finite.
    """
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    bad = [(name, tensor) for name, tensor in items if not is_finite(tensor)]
    if not bad:
        return
    told = [f"{name} ({place_of(name)}{_count(tensor)})" for name, tensor in bad[:MOST_NAMED]]
    more = f" and {len(bad) - MOST_NAMED} more tensors" if len(bad) > MOST_NAMED else ""
    raise NonFiniteError(
        f"{what} are not finite: {', '.join(told)}{more}. Finite numbers were expected: a model "
        f"with such weights gives nothing else. {cure}"
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are numbers. Makes no copy, unless their sum overflows."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return True
    tensor = tensor.detach()
    if tensor.element_size() == 1:  # eight bits: torch has few operations on them
        tensor = tensor.float()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())


def _count(tensor: torch.Tensor) -> str:
    tensor = tensor.detach().float()
    nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return f"{nan} nan, {inf} inf of {tensor.numel()} values"
