"""Stages of decoder-only language models, and of reward models: for every decoder of transformers.

The model's own forward runs on every stage, on the token ids: masks, rotary embeddings and the loop
over layers stay those of transformers, and no model code is copied (stageline/stages/splice.py).

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from stageline.cache_trial import cache_name
from stageline.contracts import ROW_LENGTHS, SHARED
from stageline.errors import UserError
from stageline.model_folder import (
    attention_options,
    called_alike,
    has_trusted_code,
    is_of_library,
    refused_build,
    rope_parameters,
    short_length,
)
from stageline.modules.chunked_loss import runs_alone
from stageline.modules.losses import target_places
from stageline.modules.router_records import recording_routers, watch_routers
from stageline.pipeline.topology import layer_range, no_tower
from stageline.stages.base import StageModel
from stageline.stages.discover import ModelPaths, find_paths, is_pixel, plan_of, sizes_of
from stageline.stages.packing import (
    FLAG,
    RouterLoss,
    find_router_loss,
    is_packed,
    known_rows,
    row_lengths,
)
from stageline.stages.splice import Spliced
from stageline.stages.split_plan import SplitPlan


def refuse_both_ways(whole: PreTrainedModel, layers: str) -> None:
    """Refuse models of BERT's kind whose tokens see those that they are to predict."""
    config = whole.config
    told = {"causal": getattr(config, "causal", True), "attn_type": getattr(config, "attn_type", 0)}
    for module in whole.get_submodule(layers).modules():
        told["is_decoder"] = told.get("is_decoder", True) and getattr(module, "is_decoder", True)
    found = [name for name, value in told.items() if value is False or value == "bi"]
    if found and is_of_library(whole):
        raise UserError(
            f"{found[0]} is {str(told[found[0]]).lower()} in the configuration of "
            f"{config.model_type}: each token sees the one that it predicts. Choose a decoder, or "
            "set the field if it was trained so."
        )


# Models that may read a prompt of text in pieces, each on the keys and values of those before, as
# the tests compare with transformers. Others may keep more between passes, or look ahead.
READ_IN_PIECES = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"),
        *("gpt2", "gpt_neox", "mixtral", "qwen3_moe"),
        *("internvl", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        *("idefics3", "smolvlm"),
    }
)
# with these layers, a token sees only the tokens before it
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def can_be_cut(config: PretrainedConfig) -> bool:
    """Whether a piece is read as it would be in the whole prompt."""
    text = config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None) or ()
    rope_types = [one.get("rope_type", "default") for one in rope_parameters(text)]
    return (
        config.model_type in READ_IN_PIECES
        and LAYER_TYPES.issuperset(layer_types)
        and not getattr(text, "use_bidirectional_attention", None)
        # frequencies of the longest row of a pass: a piece's would be others
        and not any("dynamic" in kind or kind == "longrope" for kind in rope_types)
    )


Batch = dict[str, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


class CausalLMStage(Spliced, StageModel):
    """A stage of a decoder. What differs for an architecture is overridden in a subclass.

    Attributes:
        plan: how the whole model is split.
        router_loss: the load-balancing loss of a mixture of experts; None: there is none, or it
            was not asked for.
    """

    auto_class: type[_BaseAutoModelClass] = AutoModelForCausalLM
    plan: SplitPlan
    paths: ModelPaths

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        attn_implementation: str | None = None,
        output_router_logits: bool | None = None,
        router_aux_loss_coef: float | None = None,
        dtype: torch.dtype = torch.float32,
        **stage_kwargs: Any,
    ) -> None:
        ratio = stage_kwargs.get("visual_gpu_ratio")
        if ratio and not hasattr(self, "tower_partition"):
            raise no_tower("visual_gpu_ratio", ratio, config.model_type)
        self.__dict__["config"] = config  # read before the base class sets it
        whole = self.build_whole(config, dtype=dtype, attn_implementation=attn_implementation)
        parts = {name: getattr(whole.config, name, None) for name in whole.config.sub_configs}
        configs: dict[str, Any] = {"": whole.config, **parts}
        # with a cache transformers takes a packed row for one sample, and keeps keys and values
        self.cached_configs = tuple(
            name for name, one in configs.items() if getattr(one, "use_cache", None)
        )
        for name in self.cached_configs:
            configs[name].use_cache = False
        self.plan = self.find_plan(whole)
        if self.auto_class is AutoModelForCausalLM:
            refuse_both_ways(whole, self.plan.layers)
        super().__init__(config, dtype=dtype, **stage_kwargs)
        self.paths = self.find_paths(whole)
        config_asks = bool(getattr(self.text_config, FLAG, False))
        asks = config_asks if output_router_logits is None else output_router_logits
        self.router_loss: RouterLoss | None = None
        if asks:
            self.router_loss = find_router_loss(whole, coefficient=router_aux_loss_coef)
        # transformers would compute its own router loss, from all layers
        self.flags: dict[str, bool] = {FLAG: False} if asks or config_asks else {}
        self.adopt(whole)

    def build_whole(
        self, config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str | None
    ) -> PreTrainedModel:
        """The whole model on the meta device."""
        kwargs: dict[str, object] = {"trust_remote_code": has_trusted_code(config)}
        with torch.device("meta"):
            try:
                kwargs |= attention_options(config, attn_implementation)
                return called_alike(self.auto_class.from_config(config, dtype=dtype, **kwargs))
            except Exception as error:  # from_config can raise any exception type here
                raise refused_build(config, self.auto_class, error, attn_implementation) from error

    def find_plan(self, whole: PreTrainedModel) -> SplitPlan:
        """Return how the whole model is split, found by a tracing pass."""
        return plan_of(whole, run_whole, kind="logits", sizes=self.sizes)

    def find_paths(self, whole: PreTrainedModel) -> ModelPaths:
        return find_paths(whole, self.plan)

    def num_layers(self) -> int:
        return self.plan.size

    def parts(self) -> dict[str, list[str]]:
        paths = self.paths
        return {
            "vit": [path for path in (paths.vision_tower, *paths.beside_tower) if path],
            "mlp": [path for path in (paths.projector, *paths.beside_projector) if path],
            "llm": [paths.text_model, *paths.beside_text],
            "lm_head": [path for path in (paths.head, *paths.behind) if path],
        }

    def modules_to_shard(self) -> list[torch.nn.Module]:
        return [layer for index, layer in self.layer_list() if index in self.layers]

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs come apart from those of weights in zero-bubble schedules.

        Paths to several tensors share nodes, which torch's split backward pass frees too early.
        """
        return all(len(slots) == 1 for slots in self.plan.borders)

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head share their weight."""
        return bool(getattr(self.config, "tie_word_embeddings", False))

    def layer_name(self, index: int) -> str:
        return f"{self.paths.layers}.{index}"

    def adopt(self, whole: PreTrainedModel) -> None:
        super().adopt(whole)
        self.shared_names |= self.plan.shared_names
        if not (self.is_first and self.is_last):  # hooks on all layers take time in each pass
            self.intercept()
        if self.router_loss is not None:
            watch_routers(whole.base_model, self.modules_to_shard())

    def prune(self, whole: PreTrainedModel) -> None:
        self.splice(whole)

    def layer_list(self) -> list[tuple[int, torch.nn.Module]]:
        return list(enumerate(cast(torch.nn.ModuleList, self.get_submodule(self.plan.layers))))

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the micro-batch's inputs of the model's forward, without its token ids."""
        # packed rows get no mask: it would hide the borders of samples
        masks = ("attention_mask", "sample_ids") if is_packed(batch) else ()
        others = ("input_ids", ROW_LENGTHS, *masks)
        return {name: value for name, value in batch.items() if name not in others}

    def host_facts(self, batch: Batch) -> Batch:
        return {**row_lengths(batch), **target_places(batch)}

    def get_example_input(self, micro_batch_size: int, max_token_num: int | None = None) -> Tensors:
        if self.is_first:
            return super().get_example_input(micro_batch_size, max_token_num)
        ids_BT = torch.empty(micro_batch_size, self.row_length(max_token_num), device="meta")
        return self._border(sizes_of(None, {"input_ids": ids_BT}), has_pictures=False)

    def get_batch_input(self, batch: Batch) -> Tensors:
        if self.is_first or not self.has_pictures(batch):
            return super().get_batch_input(batch)
        return self._border(self.sizes(batch), has_pictures=True)

    def sizes(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the sizes of a micro-batch that the letters in shapes of borders stand for."""
        return sizes_of(self.config, batch)

    def _border(self, sizes: dict[str, int], *, has_pictures: bool) -> Tensors:
        # `_successor` changes only the number of a stage, so compute its border from that
        border = layer_range(self.partition, self.stage).start
        slots = self.plan.slots(border, has_pictures=has_pictures)
        floats = [slot.meta(sizes) for slot in slots if slot.dtype.is_floating_point]
        others = [slot.meta(sizes) for slot in slots if not slot.dtype.is_floating_point]
        routers = [] if self.router_loss is None else [self.router_loss.example()]
        return (*floats, *routers, *others)

    def has_pictures(self, batch: Batch) -> bool:
        """Whether the micro-batch has a picture; by its token ids, which all stages have."""
        return False

    def _brings_pictures(self, came: Tensors, batch: Batch) -> bool:
        """Whether pictures come in; an answer may contain their token, so ids decide last."""
        if self.is_first:
            return any(is_pixel(name) for name in batch)
        borders = (self.layers.start, *([] if self.is_last else [self.layers.stop]))
        without = [self.plan.slots(border, has_pictures=False) for border in borders]
        those = [self.plan.slots(border, has_pictures=True) for border in borders]
        if without == those:
            return False  # the same tensors cross either way, so no device needs to be asked
        if came and len(without[0]) != len(those[0]):
            return len(came) == len(those[0])
        return self.has_pictures(batch)

    @functools.cached_property
    def can_decode(self) -> bool:
        """Whether keys and values are all that a stage has to remember of the tokens so far."""
        kinds = set(getattr(self.text_config, "layer_types", None) or ())
        return (
            kinds <= LAYER_TYPES
            and all(len(slots) == 1 for slots in self.plan.borders)
            and self._cache_name is not None
        )

    @functools.cached_property
    def _cache_name(self) -> str | None:  # to look it up takes a while, and each step asks
        return cache_name(self.whole)

    def answer_only(self) -> None:
        super().answer_only()
        self.router_loss, self.logits_chunk = None, 0

    @property
    def reads_in_pieces(self) -> bool:
        return can_be_cut(self.config)

    @functools.cached_property
    def reads_once(self) -> bool:
        """Whether `SHARED` tokens can be read once: rows draw nothing, and experts count none."""
        told = self.text_config.to_dict()
        others: list[Any] = [told[name] for name in told if "drop" in name or "expert" in name]
        others += [one.dropout for one in self.lora.values()]
        is_text = self.auto_class is AutoModelForCausalLM
        return is_text and self.can_decode and self.reads_in_pieces and not any(others)

    @property
    def short_length(self) -> int | None:
        return short_length(self.text_config)

    def head_runs_alone(self) -> bool:
        return runs_alone(self.whole, dtype=self.dtype)

    @property
    def runs_head(self) -> bool:
        """On the last stage the class's own forward runs: it may scale or cap the logits."""
        return not (self.is_last and self.logits_chunk)

    def finish(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        """Return the last stage's output where it does not run the model's own head."""
        return hidden_BTH

    def forward(
        self, hidden_or_ids: torch.Tensor, *extras: torch.Tensor, **batch: torch.Tensor
    ) -> torch.Tensor | Tensors:
        if SHARED in batch:
            return self._read_once(hidden_or_ids, **batch)
        ids, came = hidden_or_ids, Tensors()
        statistics: torch.Tensor | None = None
        if not self.is_first:
            came = (hidden_or_ids, *extras)
            if "input_ids" not in batch:  # a stage that is measured by itself
                ids = hidden_or_ids.new_zeros(hidden_or_ids.shape[:2], dtype=torch.long)
            ids = batch.get("input_ids", ids)
            if self.router_loss is not None:
                place = sum(tensor.is_floating_point() for tensor in came) - 1
                statistics = came[place]
                came = (*came[:place], *came[place + 1 :])
        has_pictures = self._brings_pictures(came, {**batch, "input_ids": ids})
        inputs = self.model_inputs(batch)
        # keys and values are kept where someone brings a place for them, and made nowhere else
        cache = inputs.pop("past_key_values", None)
        inputs |= {**self.flags, "use_cache": cache is not None}
        if cache is not None:
            inputs[self._cache_name or "past_key_values"] = cache

        run = functools.partial(self.run, ids, inputs)
        with known_rows(batch), recording_routers(self.router_loss is not None) as router_logits:
            made = self.run_spliced(run, came, has_pictures=has_pictures, ids=ids)
        if self.router_loss is None:
            return made if self.is_last or len(made) > 1 else made[0]
        first = made if self.is_last else made[0]
        mask = batch.get("attention_mask")
        statistics = self.router_loss.add(statistics, router_logits, mask, device=first.device)
        if self.is_last:
            return made, self.router_loss.loss(statistics)
        count = sum(tensor.is_floating_point() for tensor in made)
        return (*made[:count], statistics, *made[count:])

    def _read_once(self, hidden_or_ids: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        """Run rows, padded on the right, that begin alike: their first tokens once, then others."""
        size, ids_BT = len(batch[SHARED]), batch.get("input_ids", hidden_or_ids)
        num_rows, width = ids_BT.shape
        layers: list[Any] = [DynamicLayer() for _ in range(self.num_cache_layers())]
        cache, made = Cache(layers), list[Any]()
        for rows, columns in ((slice(1), slice(size)), (slice(num_rows), slice(size, width))):
            inputs: dict[str, Any] = {"input_ids": ids_BT[rows, columns], "past_key_values": cache}
            inputs["position_ids"] = torch.arange(width, device=ids_BT.device)[None, columns]
            # contiguous: the next stage, which gets them in a message, has no view of more
            made.append(self.forward(hidden_or_ids[rows, columns].contiguous(), **inputs))
            for layer in layers:  # layers of other stages only tell how long rows are
                none = made[0][:, None, :, :1]
                kept = (layer.keys, layer.values) if layer.is_initialized else (none, none)
                layer.keys, layer.values = (one.expand(num_rows, -1, -1, -1) for one in kept)
                layer.is_initialized = True
        return torch.cat((made[0].expand(num_rows, -1, -1), made[1]), dim=1)

    def run(self, ids_BT: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """The model's own forward, up to logits [B, T, V] or what `finish` makes."""
        if self.runs_head:
            return self.whole(input_ids=ids_BT, **inputs).logits
        return self.finish(self.whole.base_model(input_ids=ids_BT, **inputs).last_hidden_state)


def run_whole(whole: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> object:
    """A forward pass of a whole model, as a rehearsal runs it."""
    asks = getattr(whole.config.get_text_config(decoder=True), FLAG, False)
    return whole(**batch, use_cache=False, **({FLAG: False} if asks else {}))


SCORE = "score"
CLASSIFIER = "ForSequenceClassification"


class RewardStage(CausalLMStage):
    """A stage of a reward model; the last one gives scores [B, T, 1], one for each token.

    The model is the sequence classifier of transformers with one label. It starts from a language
    model, whose output layer is left out and whose linear layer `score` is new, or from such a
    classifier. A reward is the score at the last token of a row.
    """

    auto_class = AutoModelForSequenceClassification
    is_tied = False
    gives_scores = True
    runs_head = False  # the forward of transformers would pick the last token by its id
    head_runs_alone = StageModel.head_runs_alone  # it gives scores
    # output layers of a language model; older folders of gpt_neox have the second name
    unused_names = ("lm_head.", "embed_out.")

    def __init__(self, config: PretrainedConfig, **stage_kwargs: Any) -> None:
        is_classifier = any(name.endswith(CLASSIFIER) for name in config.architectures or ())
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise UserError(
                f"transformers has no sequence classifier for {config.model_type}. Choose another "
                "architecture for `train_model` reward."
            )
        if is_classifier and config.num_labels != 1:
            raise UserError(
                f"The model has {config.num_labels} labels, and a reward is one number. Start from "
                "a language model, or from a classifier with num_labels 1."
            )
        config.num_labels = 1
        super().__init__(config, **stage_kwargs)
        if not is_classifier:
            self.fresh_names = frozenset({f"{SCORE}.weight"})

    def find_paths(self, whole: PreTrainedModel) -> ModelPaths:
        if not isinstance(getattr(whole, SCORE, None), torch.nn.Linear):
            raise UserError(
                f"{type(whole).__name__} has no linear layer {SCORE!r} behind its decoder. Choose "
                "a decoder whose classifier in transformers has one."
            )
        return replace(super().find_paths(whole), head=SCORE, behind=())

    def find_plan(self, whole: PreTrainedModel) -> SplitPlan:
        def run(whole: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> object:
            hidden = whole.base_model(**batch, use_cache=False).last_hidden_state
            return whole.get_submodule(SCORE)(hidden)

        return plan_of(whole, run, kind="scores", sizes=self.sizes)

    def finish(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        return self.whole.score(hidden_BTH)

    @classmethod
    def build(cls, **options: Any) -> tuple[StageModel, object, int]:
        model, processor, pad_token_id = super().build(**options)
        if processor is not None:
            # transformers finds the end of a row by it when the saved folder is used
            assert model.whole is not None  # it is a transformers model
            model.config.pad_token_id = model.whole.config.pad_token_id = pad_token_id
        return model, processor, pad_token_id
