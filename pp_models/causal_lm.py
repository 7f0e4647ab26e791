"""Stages of decoder-only language models: one class for every decoder of transformers.

The model's own forward runs with `inputs_embeds`: masks, rotary embeddings and the loop over
layers stay the library's, and no model code is copied.
"""

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pp_models.attention import cache_off, refused_attention
from pp_models.base import StageModel
from pp_models.discover import EMBEDDING_DROPOUTS, POSITION_EMBEDDINGS, ModelPaths, find_paths
from pp_models.packing import is_packed, without_masks
from pp_models.prompt_pieces import can_be_cut
from pp_models.router_loss import FLAG, RouterLoss, find_router_loss, has_routers
from register import train_model_register
from stageline.model_folder import has_trusted_code
from stageline.modules.pass_through import PassThrough, ZeroEmbedding


class CausalLMStage(StageModel):
    """A stage of a decoder. What differs for an architecture is overridden in a subclass.

    Attributes:
        router_loss: the load-balancing loss of a mixture of experts; None: there is none, or it
            was not asked for.
    """

    auto_class: type = AutoModelForCausalLM
    paths: ModelPaths
    can_decode = True

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        attn_implementation: str | None = None,
        output_router_logits: bool | None = None,
        router_aux_loss_coef: float | None = None,
        **stage_kwargs: object,
    ) -> None:
        super().__init__(config, **stage_kwargs)
        with torch.device("meta"):
            kwargs: dict[str, object] = {"trust_remote_code": has_trusted_code(config)}
            if attn_implementation:
                kwargs["attn_implementation"] = attn_implementation
            try:
                whole = self.auto_class.from_config(config, dtype=self.dtype, **kwargs)
            except (ValueError, ImportError) as error:
                raise refused_attention(config, attn_implementation, error) from error
        self.cached_configs = cache_off(whole.config)
        self.paths = self.find_paths(whole)
        config_asks = bool(getattr(self.text_config, FLAG, False))
        asks = config_asks if output_router_logits is None else output_router_logits
        self.router_loss: RouterLoss | None = None
        if asks:
            self.router_loss = find_router_loss(whole, coefficient=router_aux_loss_coef)
        self.adopt(whole)
        # the library computes a loss of its own from what it records, and fails on no layers
        records = asks and has_routers(whole)
        self.flags: dict[str, bool] = {FLAG: records} if asks or config_asks else {}

    def find_paths(self, whole: PreTrainedModel) -> ModelPaths:
        """Where the parts of the whole model lie."""
        return find_paths(whole)

    def parts(self) -> dict[str, list[str]]:
        return {
            "vit": [self.paths.vision_tower] if self.paths.vision_tower else [],
            "mlp": [path for path in (self.paths.projector, *self.paths.beside_projector) if path],
            "llm": [self.paths.text_model],
            "lm_head": [self.paths.head] if self.paths.head else [],
        }

    def modules_to_shard(self) -> list[torch.nn.Module]:
        layers = self.get_submodule(self.paths.layers)
        return [layers[index] for index in self.layers]

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head share their weight."""
        return bool(getattr(self.config, "tie_word_embeddings", False))

    def layer_name(self, index: int) -> str:
        return f"{self.paths.layers}.{index}"

    def prune(self, whole: PreTrainedModel) -> None:
        text_model = whole.get_submodule(self.paths.text_model)
        layers = whole.get_submodule(self.paths.layers)
        for index in range(len(layers)):
            if index not in self.layers:
                layers[index] = PassThrough()
        if not self.is_first:
            self._prune_front(whole, text_model)
        if not self.is_last:
            _replace(whole, self.paths.final_norm)
            _replace(whole, self.paths.head)

    def _prune_front(self, whole: PreTrainedModel, text_model: torch.nn.Module) -> None:
        paths = self.paths
        for path in (*paths.beside_projector, paths.projector, paths.vision_tower):
            if path:
                _replace(whole, path)
        # a tied head needs its weight, which has the embedding's name
        if not (self.is_tied and self.is_last):
            _replace(whole, self.paths.embedding)
        for name in POSITION_EMBEDDINGS:
            if hasattr(text_model, name):
                setattr(text_model, name, ZeroEmbedding())
        for name in EMBEDDING_DROPOUTS:
            if hasattr(text_model, name):
                setattr(text_model, name, PassThrough())

    def layer_list(self) -> list[tuple[int, torch.nn.Module]]:
        return list(enumerate(self.whole.get_submodule(self.paths.layers)))

    def model_inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What of the micro-batch the model's forward takes, besides its first input."""
        inputs = {name: value for name, value in batch.items() if name != "input_ids"}
        return without_masks(inputs) if is_packed(batch) else inputs

    def get_example_input(
        self, micro_batch_size: int, max_token_num: int
    ) -> tuple[torch.Tensor, ...]:
        tensors = super().get_example_input(micro_batch_size, max_token_num)
        if self.router_loss is None or self.is_first:
            return tensors
        return (*tensors, self.router_loss.example())

    def answer_only(self) -> None:
        super().answer_only()
        self.router_loss, self.logits_chunk = None, 0
        self.flags = dict.fromkeys(self.flags, False)

    @property
    def reads_in_pieces(self) -> bool:
        return can_be_cut(self.config)

    @property
    def runs_head(self) -> bool:
        """On the last stage the class's own forward runs: it may scale or cap the logits."""
        return self.is_last and not self.logits_chunk

    def finish(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        """What goes on of a stage that does not run the model's own head."""
        return hidden_BTH

    def forward(
        self,
        hidden_or_ids: torch.Tensor,
        *extras: torch.Tensor,
        **batch: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        inputs = self.model_inputs(batch)
        inputs["input_ids" if self.is_first else "inputs_embeds"] = hidden_or_ids
        has_head = self.runs_head
        model = self.whole if has_head else self.whole.base_model
        # keys and values are kept where someone brings a place for them, and made nowhere else
        has_cache = inputs.get("past_key_values") is not None
        outputs = model(**inputs, **self.flags, use_cache=has_cache)
        tensor = outputs.logits if has_head else self.finish(outputs.last_hidden_state)
        if self.router_loss is None:
            return tensor
        statistics = self.router_loss.add(
            extras[0] if extras else None,
            getattr(outputs, "router_logits", None) or (),
            batch.get("attention_mask"),
            device=tensor.device,
        )
        return tensor, self.router_loss.loss(statistics) if self.is_last else statistics


def _replace(whole: PreTrainedModel, path: str) -> None:
    parent, _, name = path.rpartition(".")
    try:
        module = whole.get_submodule(parent)
    except AttributeError:
        return  # its parent went before it: a projector inside a vision tower
    if name in module._parameters:
        delattr(module, name)
        # no longer a weight, but the library's own initialisation writes into it
        setattr(module, name, torch.empty(0, device="cpu"))
    else:
        setattr(module, name, PassThrough())


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
