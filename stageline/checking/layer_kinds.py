"""Which layers of a model are alike, read from the lists of its configuration, and fewer of them.

A layer's kind is all that the configuration says about it alone: its entry in every list with one
entry a layer, whether its index is in a list of indices, what is overridden for it. In a copy with
fewer layers the kinds take turns, in the order in which they first appear.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Told = Mapping[str, Any]
DEPTHS = (
    *("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers"),
    *("num_layers", "layers", "num_blocks", "depth", "encoder_layers", "num_encoder_layers"),
)
# lists of the indices of some layers
INDICES = (
    *("attn_layer_indices", "cross_attention_layers", "full_attn_idxs", "hybrid_layer_ids"),
    *("mlp_only_layers", "moe_layers", "ple_layer_ids", "local_layer_ids", "rope_scaling_layers"),
)
# every n-th layer is another: (interval, where it begins)
INTERVALS = (
    *(("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset")),
    *(("decoder_sparse_step", None), ("moe_layer_interval", None), ("layer_group_size", None)),
    ("n_layers_per_attn_res_block", None),
)
LISTED = ("attn_layer_period", "layer_group_size")  # said by the list of kinds, where there is one
# entry of a layer: the layer whose keys and values it uses
SOURCES = ("kv_source_layers",)
# so many first layers are dense, in models without a list of kinds
PREFIXES = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
MOST = 4  # layers of an interval in a copy


def depth_of(told: Told) -> int:
    """The number of layers; 0: the configuration has none."""
    found = next((told[name] for name in DEPTHS if isinstance(told.get(name), int)), 0)
    lists = (told.get(name) for name in ("layers_block_type", "layer_types"))
    return found or next((len(one) for one in lists if isinstance(one, list)), 0)


class LayerKinds:
    """The kinds of layers of one configuration.

    Args:
        told: its fields, as `to_dict` gives them.

    Attributes:
        depth: the number of layers.
        firsts: of each kind the first layer, in rising order.
    """

    def __init__(self, told: Told) -> None:
        self.told = told
        self.depth = depth_of(told)
        self.lists = [name for name, value in told.items() if self._is_list(name, value)]
        self.indices = [name for name in INDICES if isinstance(told.get(name), list)]
        self.sources = [name for name in SOURCES if isinstance(told.get(name), list)]
        own = told.get("per_layer_config") or {}
        self.overrides = {int(index): fields for index, fields in own.items()}
        kinds: dict[str, int] = {}
        for index in range(self.depth):
            kinds.setdefault(self._kind(index), index)
        self.firsts = list(kinds.values())

    @property
    def period(self) -> int:
        """So many layers of a copy have every kind."""
        patterns = [len(self.told.get("block_types") or [0])]
        listed = {"layers_block_type", "layer_types"} & set(self.lists)
        names = [name for name, _ in INTERVALS if not (listed and name in LISTED)]
        steps = [_interval(self.told.get(name)) for name in names]
        before = any(self.told.get(name) for name in PREFIXES) and len(self.firsts) == 1
        return math.lcm(max(len(self.firsts), 1 + before), *patterns, *steps)

    def model(self, index: int) -> int:
        """The layer that layer `index` of a copy is made after."""
        return self.firsts[index % len(self.firsts)]

    def fewer(self, num_layers: int) -> dict[str, Any]:
        """The fields that tell the kinds, for a copy of so many layers."""
        models = [self.model(index) for index in range(num_layers)]
        fields: dict[str, Any] = {}
        for name in self.lists:
            entries = [self.told[name][model] for model in models]
            fields[name] = "".join(entries) if isinstance(self.told[name], str) else entries
        for name in self.indices:
            fields[name] = [i for i, model in enumerate(models) if model in self.told[name]]
        for name in self.sources:
            fields[name] = _sources(self.told[name], models)
        if self.overrides:
            own = {i: self.overrides[m] for i, m in enumerate(models) if m in self.overrides}
            fields["per_layer_config"] = own
        for name, offset in INTERVALS:
            if isinstance(self.told.get(name), int):
                fields[name] = _interval(self.told[name])
                if offset:
                    fields[offset] = self.told[offset] % fields[name]
        fields |= {name: min(self.told[name], 1) for name in PREFIXES if self.told.get(name)}
        return fields

    def _is_list(self, name: str, value: object) -> bool:
        if name in (*INDICES, *SOURCES) or not isinstance(value, list | str):
            return False
        if isinstance(value, str):
            return name.endswith("pattern") and len(value) == self.depth > 0
        return len(value) == self.depth > 1 and not name.endswith(("token_ids", "token_id"))

    def _kind(self, index: int) -> str:
        facts: list[object] = [self.told[name][index] for name in self.lists]
        facts += [index in self.told[name] for name in self.indices]
        facts += [self.told[name][index] == index for name in self.sources]
        return repr((facts, self.overrides.get(index)))


def _interval(step: object) -> int:
    """An interval of at most `MOST` layers; halves keep what two intervals have in common."""
    if not isinstance(step, int) or step < 1:
        return 1
    while step > MOST:
        step = step // 2 if step % 2 == 0 else MOST
    return step


def _sources(told: Sequence[int], models: Sequence[int]) -> list[int]:
    made: list[int] = []
    for index, model in enumerate(models):
        made.append(index if told[model] == model or not made else made[-1])
    return made
