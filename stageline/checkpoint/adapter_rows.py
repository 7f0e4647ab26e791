"""Rows of new tokens in an adapter folder, as `peft` writes them: `trainable_token_indices`.

The folder holds the rows themselves, not what was added to them. Its base need not have them: it
is enlarged before they are put in. A model must be that too before `peft` loads the folder:
`model.resize_token_embeddings(len(tokenizer))`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.errors import CheckpointError
from stageline.modules.new_rows import (
    enlarge,
    fold_rows,
    vocabulary_modules,
    vocabulary_paths,
)

if TYPE_CHECKING:
    from stageline.checkpoint.adapter import Adapter

INDICES = "trainable_token_indices"
ROWS_OF_PEFT = ".token_adapter.trainable_tokens_delta"
# what peft keeps of a whole matrix whose rows it trains
WHOLE_OF_PEFT = ".token_adapter.base_layer"
Rows = dict[str, tuple[list[int], torch.Tensor]]


def split_rows(
    extras: Mapping[str, torch.Tensor], config: Mapping[str, object], file: Path
) -> tuple[Rows, dict[str, torch.Tensor]]:
    """What is beside LoRA in an adapter: module -> (ids, rows), and whole parameters by name.

    Raises:
        CheckpointError: rows without their ids, or another number of them.
    """
    told = config.get(INDICES) or {}
    rows: Rows = {}
    whole = {}
    for name, tensor in extras.items():
        module, is_rows, _ = name.partition(ROWS_OF_PEFT)
        if not is_rows:
            whole[name.replace(WHOLE_OF_PEFT, "")] = tensor
            continue
        ids = told if isinstance(told, list) else _of_module(told, module)
        if ids is None or tensor.ndim != 2 or len(ids) != len(tensor):
            raise CheckpointError(
                f"{file} holds {list(tensor.shape)} rows of new tokens for {module}, and "
                f"{ADAPTER_CONFIG} names {0 if ids is None else len(ids)} of them in {INDICES}: "
                "one id a row was expected. Copy the adapter again."
            )
        rows[module] = (list(ids), tensor)
    return rows, whole


def _of_module(told: Mapping[str, list[int]], module: str) -> list[int] | None:
    if len(told) == 1:  # of a tied head, too, which peft does not name
        return next(iter(told.values()))
    return next(
        (ids for name, ids in told.items() if module == name or module.endswith("." + name)), None
    )


# -- into a model --------------------------------------------------------------------------------


def fit_vocabulary(model: nn.Module, adapters: "Iterable[Adapter]") -> None:
    """Enlarges embedding and head of a filled model to what adapters hold for them."""
    paths = _paths(model)
    needed = [0]
    for adapter in adapters:
        needed += [max(ids) + 1 for ids, _ in adapter.rows.values()]
        whole = [adapter.extras.get(f"{path}.weight") for path in paths]
        needed += [weight.shape[0] for weight in whole if weight is not None]
    enlarge(model, paths, max(needed))


@torch.no_grad()
def put_rows(model: nn.Module, adapter: "Adapter") -> None:
    """Writes the rows of an adapter into those matrices of a model that are here."""
    paths = _paths(model)
    unknown = set(adapter.rows) - set(paths)
    if unknown:
        raise CheckpointError(
            f"the adapter {adapter.folder} has rows of new tokens for {', '.join(sorted(unknown))},"
            f" embedding or head were expected, which are {', '.join(paths)} here: use it with the "
            "model it was trained on."
        )
    here = vocabulary_modules(model, paths)
    for path, (ids, values) in adapter.rows.items():
        if path in here:
            weight = here[path].weight
            weight[torch.tensor(ids, device=weight.device)] = values.to(weight)
    known = {token for ids, _ in adapter.rows.values() for token in ids}
    model.token_ids = tuple(sorted({*getattr(model, "token_ids", ()), *known}))


def _paths(model: nn.Module) -> tuple[str, ...]:
    found = getattr(model, "vocabulary", None)
    if found is not None:
        return found
    return vocabulary_paths(model) if hasattr(model, "get_input_embeddings") else ()


# -- out of a model ------------------------------------------------------------------------------


def rows_share(stage: nn.Module, *, trained: Sequence[str]) -> Rows:
    """Module -> (ids, rows) of new tokens that an adapter has to hold: a copy on the host.

    Args:
        trained: names of parameters that the adapter holds whole.
    """
    ids = getattr(stage, "token_ids", ())
    if not ids:
        return {}
    fold_rows(stage)
    rows: Rows = {}
    done: set[int] = set()
    for path, module in vocabulary_modules(stage, stage.vocabulary).items():
        weight = module.weight
        if f"{path}.weight" in trained or id(weight) in done:
            continue
        done.add(id(weight))
        index = torch.tensor(ids, device=weight.device)
        rows[path] = (list(ids), weight.detach()[index].to("cpu", copy=True))
    return rows
