"""Tries, before training, whether a stage keeps packed samples apart. Asks no model for its name.

Two samples lie in one row. The gradient of the second one's output with respect to the first one's
input must be exactly zero (and the other way round), and the second must come out as it does alone.
Catches models that build no mask from positions, mix neighbours by convolutions or recurrences, or
know no position ids, and attention kernels that see one row only.

Shapes: B rows, T tokens, H hidden size.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from stageline.errors import UserError

_LENGTH = 5  # of each of the two samples
# largest relative difference between packed and alone that rounding explains
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def check_packing(model: Any, *, rows: int, device: torch.device | str = "cpu") -> None:
    """Refuses a stage in which a packed sample depends on another one.

    Runs the stage forward on a few tokens, as many rows as a micro-batch has; no gradient is kept.

    Raises:
        UserError: says what goes wrong and what to do.
    """
    was_training = model.training
    model.eval()
    try:
        packed_BTH, source_BTH = _run(model, rows, 2, device)
        _check_apart(model, packed_BTH, source_BTH, rows)
        alone_BTH, _ = _run(model, rows, 1, device)
        _check_equal(model, packed_BTH, alone_BTH)
    except TypeError as error:
        raise _refusal(model, f"its forward does not take position ids ({error})") from error
    finally:
        model.train(was_training)


def _run(
    model: Any, rows: int, num_samples: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and (embedded) input of rows of that many samples; the last one is always the same."""
    batch = _batch(rows, num_samples, device)
    with torch.enable_grad():
        if model.is_first:
            with _embedded(model) as found:
                output = model(batch["input_ids"], **batch)
            source = found[0]
        else:
            source = _hidden(model, rows, num_samples, device)
            extras = model.get_example_input(rows, _LENGTH * num_samples)[1:]
            zeros = [torch.zeros(meta.shape, dtype=meta.dtype, device=device) for meta in extras]
            output = model(source, *zeros, **batch)
    return output[0] if isinstance(output, tuple) else output, source


def _batch(rows: int, num_samples: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 3 + 2 * _LENGTH)[-num_samples * _LENGTH :]
    sample_ids = torch.arange(num_samples).repeat_interleave(_LENGTH)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(_LENGTH).repeat(num_samples),
        "sample_ids": sample_ids,
    }
    return {name: value.expand(rows, -1).to(device) for name, value in batch.items()}


def _hidden(model: Any, rows: int, num_samples: int, device: torch.device | str) -> torch.Tensor:
    meta = model.get_example_input(rows, 2 * _LENGTH)[0]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(meta.shape, generator=generator)[:, -num_samples * _LENGTH :]
    return drawn.to(device=device, dtype=meta.dtype).requires_grad_()


@contextlib.contextmanager
def _embedded(model: Any) -> Iterator[list[torch.Tensor]]:
    """Catches what the embedding of the first stage gives, as a leaf of the graph."""
    found: list[torch.Tensor] = []

    def catch(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        found.append(output.detach().requires_grad_())
        return found[-1]

    inner = model if getattr(model, "whole", None) is None else model.whole
    if not hasattr(inner, "get_input_embeddings"):
        raise _refusal(model, "it has no get_input_embeddings, so that this can't be tried")
    handle = inner.get_input_embeddings().register_forward_hook(catch)
    try:
        yield found
    finally:
        handle.remove()


def _check_apart(model: Any, output_BTH: torch.Tensor, source_BTH: torch.Tensor, rows: int) -> None:
    parts = (slice(0, _LENGTH), slice(_LENGTH, 2 * _LENGTH))
    for own, other in (parts, parts[::-1]):
        weights = torch.arange(1, output_BTH.shape[-1] + 1, device=output_BTH.device).cos()
        total = (output_BTH[:, own].float() * weights).sum()
        (grad_BTH,) = torch.autograd.grad(total, source_BTH, retain_graph=True)
        if bool(grad_BTH[:, other].any()):
            one_row = f" with {rows} rows a micro-batch" if rows > 1 else ""
            raise _refusal(model, f"a token sees tokens of another sample{one_row}")


def _check_equal(model: Any, packed_BTH: torch.Tensor, alone_BTH: torch.Tensor) -> None:
    packed, alone = packed_BTH[:, _LENGTH:].float(), alone_BTH.float()
    difference = ((packed - alone).norm() / alone.norm()).item()
    if not difference <= _TOLERANCE.get(packed_BTH.dtype, 0.05):
        raise _refusal(
            model, f"a packed sample comes out differently than alone (by {difference:.1e})"
        )


def _refusal(model: Any, reason: str) -> UserError:
    inner = getattr(model, "whole", None)
    config = getattr(inner, "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    return UserError(
        f"--packing: stage {model.stage} of {type(inner or model).__name__} (attention {kernel}) "
        f"cannot hold several samples in one row: {reason}. Each sample was expected to come out "
        "as it does alone, because packing must not change what is learnt: leave --packing out "
        "(samples of similar length travel together anyway)"
        + (
            ", set --micro-batch-size 1, or choose --train-model.attn_implementation sdpa."
            if "flash" in str(kernel)
            else "."
        )
    )
