"""Stages of decoder-only language models: one class for every decoder of transformers.

The model's own forward runs on every stage, on the token ids: masks, rotary embeddings and the loop
over layers stay the library's, and no model code is copied (stageline/stages/splice.py).

Shapes: B rows, T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pp_models.attention import cache_off, refused_attention
from pp_models.base import StageModel
from pp_models.discover import ModelPaths, find_paths, is_pixel, plan_of, sizes_of
from pp_models.packing import is_packed, without_masks
from pp_models.prompt_pieces import can_be_cut, keeps_keys_and_values
from pp_models.router_loss import FLAG, RouterLoss, find_router_loss
from register import train_model_register
from stageline.model_folder import has_trusted_code
from stageline.modules.router_records import recording_routers, watch_routers
from stageline.pipeline.partition import layer_range
from stageline.stages.splice import Spliced
from stageline.stages.split_plan import SplitPlan

Batch = dict[str, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


class CausalLMStage(Spliced, StageModel):
    """A stage of a decoder. What differs for an architecture is overridden in a subclass.

    Attributes:
        plan: how the whole model is split.
        router_loss: the load-balancing loss of a mixture of experts; None: there is none, or it
            was not asked for.
    """

    auto_class: type = AutoModelForCausalLM
    plan: SplitPlan
    paths: ModelPaths
    can_decode = True

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        attn_implementation: str | None = None,
        output_router_logits: bool | None = None,
        router_aux_loss_coef: float | None = None,
        dtype: torch.dtype = torch.float32,
        **stage_kwargs: object,
    ) -> None:
        self.__dict__["config"] = config  # asked before the base class sets it
        whole = self.build_whole(config, dtype=dtype, attn_implementation=attn_implementation)
        self.cached_configs = cache_off(whole.config)
        self.plan = self.find_plan(whole)
        super().__init__(config, dtype=dtype, **stage_kwargs)
        self.paths = self.find_paths(whole)
        self.can_decode = self.can_decode and keeps_keys_and_values(whole, self.plan)
        config_asks = bool(getattr(self.text_config, FLAG, False))
        asks = config_asks if output_router_logits is None else output_router_logits
        self.router_loss: RouterLoss | None = None
        if asks:
            self.router_loss = find_router_loss(whole, coefficient=router_aux_loss_coef)
        # the library would compute a loss of its own, and of all layers
        self.flags: dict[str, bool] = {FLAG: False} if asks or config_asks else {}
        self.adopt(whole)

    def build_whole(
        self, config: PretrainedConfig, *, dtype: torch.dtype, attn_implementation: str | None
    ) -> PreTrainedModel:
        """The whole model on the meta device."""
        kwargs: dict[str, object] = {"trust_remote_code": has_trusted_code(config)}
        if attn_implementation:
            kwargs["attn_implementation"] = attn_implementation
        with torch.device("meta"):
            try:
                return self.auto_class.from_config(config, dtype=dtype, **kwargs)
            except (ValueError, ImportError) as error:
                raise refused_attention(config, attn_implementation, error) from error

    def find_plan(self, whole: PreTrainedModel) -> SplitPlan:
        """How the whole model is split, by a rehearsal."""
        return plan_of(whole, run_whole, kind="logits", sizes=self.sizes)

    def find_paths(self, whole: PreTrainedModel) -> ModelPaths:
        """Where the parts of the whole model lie."""
        return find_paths(whole, self.plan)

    def num_layers(self) -> int:
        return self.plan.size

    def parts(self) -> dict[str, list[str]]:
        paths = self.paths
        return {
            "vit": [paths.vision_tower] if paths.vision_tower else [],
            "mlp": [path for path in (paths.projector, *paths.beside_projector) if path],
            "llm": [paths.text_model],
            "lm_head": [path for path in (paths.head, *paths.behind) if path],
        }

    def modules_to_shard(self) -> list[torch.nn.Module]:
        return [layer for index, layer in self.layer_list() if index in self.layers]

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs come apart from those of weights in zero-bubble schedules.

        Where several tensors cross a border, paths to them share nodes, which torch's split
        backward pass frees too early: such a stage does all of its backward pass at once.
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
        self.intercept()
        if self.router_loss is not None:
            watch_routers(whole.base_model, self.modules_to_shard())

    def prune(self, whole: PreTrainedModel) -> None:
        self.splice(whole)

    def layer_list(self) -> list[tuple[int, torch.nn.Module]]:
        return list(enumerate(self.get_submodule(self.plan.layers)))

    def model_inputs(self, batch: Batch) -> Batch:
        """What of the micro-batch the model's forward takes, besides its token ids."""
        inputs = {name: value for name, value in batch.items() if name != "input_ids"}
        return without_masks(inputs) if is_packed(batch) else inputs

    def get_example_input(self, micro_batch_size: int, max_token_num: int) -> Tensors:
        if self.is_first:
            return super().get_example_input(micro_batch_size, max_token_num)
        ids_BT = torch.empty(micro_batch_size, max_token_num, dtype=torch.long, device="meta")
        return self._border(sizes_of(None, {"input_ids": ids_BT}), has_pictures=False)

    def get_batch_input(self, batch: Batch) -> Tensors:
        if self.is_first or not self.has_pictures(batch):
            return super().get_batch_input(batch)
        return self._border(self.sizes(batch), has_pictures=True)

    def sizes(self, batch: Batch) -> dict[str, int]:
        """What the letters in the shapes of borders stand for in a micro-batch."""
        return sizes_of(self.config, batch)

    def _border(self, sizes: dict[str, int], *, has_pictures: bool) -> Tensors:
        # a stage is asked about the one behind it by its number alone
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
        """By what is there, where that tells: an answer may hold the token of a picture."""
        if self.is_first:
            return any(is_pixel(name) for name in batch)
        counts = [
            len(self.plan.slots(self.layers.start, has_pictures=has)) for has in (False, True)
        ]
        if came and counts[0] != counts[1]:
            return len(came) == counts[1]
        return self.has_pictures(batch)

    def answer_only(self) -> None:
        super().answer_only()
        self.router_loss, self.logits_chunk = None, 0

    @property
    def reads_in_pieces(self) -> bool:
        return can_be_cut(self.config)

    @property
    def runs_head(self) -> bool:
        """On the last stage the class's own forward runs: it may scale or cap the logits."""
        return not (self.is_last and self.logits_chunk)

    def finish(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        """What the last stage gives where it does not run the model's own head."""
        return hidden_BTH

    def forward(
        self, hidden_or_ids: torch.Tensor, *extras: torch.Tensor, **batch: torch.Tensor
    ) -> torch.Tensor | Tensors:
        ids, came = hidden_or_ids, ()
        statistics = None
        if not self.is_first:
            came = (hidden_or_ids, *extras)
            ids = batch.get("input_ids")
            if ids is None:  # a stage that is measured by itself
                ids = hidden_or_ids.new_zeros(hidden_or_ids.shape[:2], dtype=torch.long)
            if self.router_loss is not None:
                place = sum(tensor.is_floating_point() for tensor in came) - 1
                statistics = came[place]
                came = (*came[:place], *came[place + 1 :])
        has_pictures = self._brings_pictures(came, {**batch, "input_ids": ids})
        inputs = self.model_inputs(batch)
        # keys and values are kept where someone brings a place for them, and made nowhere else
        inputs |= {**self.flags, "use_cache": inputs.get("past_key_values") is not None}

        def run() -> torch.Tensor:
            return self.run(ids, inputs)

        with recording_routers(self.router_loss is not None) as router_logits:
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

    def run(self, ids_BT: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """The model's own forward, up to logits [B, T, V] or what `finish` makes."""
        if self.runs_head:
            return self.whole(input_ids=ids_BT, **inputs).logits
        return self.finish(self.whole.base_model(input_ids=ids_BT, **inputs).last_hidden_state)


def run_whole(whole: PreTrainedModel, batch: Batch) -> object:
    """A forward pass of a whole model, as a rehearsal runs it."""
    asks = getattr(whole.config.get_text_config(decoder=True), FLAG, False)
    return whole(**batch, use_cache=False, **({FLAG: False} if asks else {}))


ROUTER_OPTIONS = """
    output_router_logits: train the load-balancing loss of a mixture of experts too; default: what
        config.json says under this name.
    router_aux_loss_coef: weight of that loss; default: what config.json says."""


def add_family(
    stage_class: type[StageModel], key: str, model_types: tuple[str, ...], text: str
) -> None:
    """Registers `stage_class` under `key` for configs of `model_types` alone."""

    def part(
        *, attn_implementation: str | None = None, **kwargs: object
    ) -> tuple[StageModel, object, int]:
        return stage_class.build(
            attn_implementation=attn_implementation, model_types=model_types, **kwargs
        )

    _put_on_shelf(part, key, text, model_types)


def add_mixture(
    stage_class: type[StageModel], key: str, model_types: tuple[str, ...], text: str
) -> None:
    """`add_family` for a mixture of experts: options for the loss of its routers come on top."""

    def part(
        *,
        attn_implementation: str | None = None,
        output_router_logits: bool | None = None,
        router_aux_loss_coef: float | None = None,
        **kwargs: object,
    ) -> tuple[StageModel, object, int]:
        return stage_class.build(
            attn_implementation=attn_implementation,
            output_router_logits=output_router_logits,
            router_aux_loss_coef=router_aux_loss_coef,
            model_types=model_types,
            **kwargs,
        )

    _put_on_shelf(part, key, text, model_types, options=ROUTER_OPTIONS)


def _put_on_shelf(
    part: Callable, key: str, text: str, model_types: tuple[str, ...], *, options: str = ""
) -> None:
    arguments = f"attn_implementation: eager, sdpa or another of the library's.{options}"
    part.__doc__ = f"{text}\n\nArgs:\n    {arguments}"
    part.__name__ = part.__qualname__ = key
    part.__module__ = __name__
    part.model_types = model_types  # tells export.py which key serves a folder
    train_model_register[key] = part


@train_model_register("causal_lm")
def causal_lm(
    *,
    attn_implementation: str | None = None,
    output_router_logits: bool | None = None,
    router_aux_loss_coef: float | None = None,
    **kwargs: object,
) -> tuple[StageModel, object, int]:
    """Any decoder-only model of transformers, split by layers.

    Args:
        attn_implementation: eager, sdpa or another of the library's.
        output_router_logits: train the load-balancing loss of a mixture of experts too; default:
            what config.json says under this name.
        router_aux_loss_coef: weight of that loss; default: what config.json says.
    """
    return CausalLMStage.build(
        attn_implementation=attn_implementation,
        output_router_logits=output_router_logits,
        router_aux_loss_coef=router_aux_loss_coef,
        **kwargs,
    )


DECODERS = {
    "llama": ("llama",),
    "mistral": ("mistral",),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3_text",),
    "phi3": ("phi3",),
    "gpt2": ("gpt2",),
    "gpt_neox": ("gpt_neox",),
}
MIXTURES = {
    "mixtral": ("mixtral",),
    "qwen3_moe": ("qwen3_moe",),
}

for _add, _families in ((add_family, DECODERS), (add_mixture, MIXTURES)):
    for _key, _model_types in _families.items():
        _text = f"The {_key} decoder; refuses any other architecture."
        _add(CausalLMStage, _key, _model_types, _text)
