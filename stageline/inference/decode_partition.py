"""Layers per stage for pipelined decoding: the slowest stage is to be as quick as can be.

A decode step reads each weight once for a few rows, so what it costs is bytes of weights. A lookup
of embeddings and a tower, which ran before the first step, cost nothing; the head costs its bytes,
also where a tied one is a second copy of the embeddings. Of experts only those are read that some
row chose.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline.errors import UserError
from stageline.inference.meta_model import layers_path, model_on_meta, text_model_path
from stageline.pipeline.partition_dp import smallest_maximum

ROWS = 8  # that decode together, where nobody says how many: it matters for experts alone


def stage_partition_by_bytes(
    layer_costs: Sequence[float],
    num_stages: int,
    *,
    front_cost: float = 0.0,
    back_cost: float = 0.0,
) -> list[int]:
    """The split whose dearest stage is cheapest, exactly; at least one layer a stage.

    Args:
        front_cost: what the first stage has besides its layers.
        back_cost: what the last stage has besides its layers.

    Raises:
        UserError: more stages than layers.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise UserError(
            f"{num_layers} layers on {num_stages} stages: a number from 1 to {num_layers} was "
            "expected, because each stage needs a layer. Use fewer stages."
        )
    sums = [0.0]
    for layer in layer_costs:
        sums.append(sums[-1] + layer)

    def cost(stage: int, start: int, end: int) -> float:
        front = front_cost if stage == 0 else 0.0
        back = back_cost if stage == num_stages - 1 else 0.0
        return sums[end] - sums[start] + front + back

    found = smallest_maximum(num_layers, num_stages, cost)
    assert found is not None, "costs are finite"
    return found


def decode_partition(
    config: PretrainedConfig,
    num_stages: int,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    num_rows: int = ROWS,
) -> list[int]:
    """Layers per stage of a model, from the bytes that a decode step reads; loads nothing.

    Args:
        num_rows: rows that decode together.
    """
    model = model_on_meta(config, dtype=dtype, trust_remote_code=trust_remote_code)
    layers, back = decode_bytes(model, num_rows=num_rows)
    return stage_partition_by_bytes(layers, num_stages, back_cost=back)


def decode_bytes(model: nn.Module, *, num_rows: int = ROWS) -> tuple[list[float], float]:
    """Bytes of weights that a decode step reads: in each layer, and behind the layers."""
    path = layers_path(model)
    share = _expert_share(model.config.get_text_config(decoder=True), num_rows)
    layers = [_read_bytes(layer, share) for layer in model.get_submodule(path)]
    text_model = model.get_submodule(text_model_path(model))
    list_name = path.rpartition(".")[2]
    beside = [child for name, child in text_model.named_children() if name != list_name]
    back = sum(_read_bytes(child, share) for child in beside)
    head = model.get_output_embeddings()
    if head is not None:  # its weight may be that of the embeddings: here it is read
        back += sum(parameter.nbytes for parameter in head.parameters())
    return layers, back


def _read_bytes(module: nn.Module, expert_share: float) -> float:
    return sum(
        parameter.nbytes * (expert_share if is_expert else 1.0)
        for parameter, is_expert in _read_parameters(module)
    )


def _read_parameters(module: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """(parameter, whether it belongs to an expert) but for those that are looked up by row."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding):
            continue
        for parameter in child._parameters.values():
            if parameter is not None:
                yield parameter, "experts" in name.split(".")


def _expert_share(config: PretrainedConfig, num_rows: int) -> float:
    """The share of experts that at least one row chooses, if rows choose evenly."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    counts = [getattr(config, name, None) for name in names]
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_k", None)
    total = next((count for count in counts if isinstance(count, int) and count > 1), None)
    if total is None or not isinstance(chosen, int):
        return 1.0
    return 1.0 - (1.0 - min(chosen, total) / total) ** num_rows
