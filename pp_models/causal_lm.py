"""Stages of decoder-only language models: one class for every decoder of transformers.

The model's own forward runs with `inputs_embeds`: masks, rotary embeddings and the loop over
layers stay the library's, and no model code is copied.
"""

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from pp_models.base import StageModel
from pp_models.discover import EMBEDDING_DROPOUTS, POSITION_EMBEDDINGS, ModelPaths, find_paths
from register import train_model_register
from stageline.errors import UserError
from stageline.modules.pass_through import PassThrough, ZeroEmbedding


class CausalLMStage(StageModel):
    """A stage of a decoder. What differs for an architecture is overridden in a subclass."""

    auto_class: type = AutoModelForCausalLM
    paths: ModelPaths

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        attn_implementation: str | None = None,
        **stage_kwargs: object,
    ) -> None:
        super().__init__(config, **stage_kwargs)
        if getattr(config.get_text_config(decoder=True), "output_router_logits", False):
            raise UserError(
                "config.output_router_logits is true, and the router loss of a mixture-of-experts "
                "model does not cross stages yet: set it to false in config.json."
            )
        with torch.device("meta"):
            kwargs = {"attn_implementation": attn_implementation} if attn_implementation else {}
            whole = self.auto_class.from_config(config, dtype=self.dtype, **kwargs)
        self.paths = find_paths(whole)
        self.adopt(whole)

    def parts(self) -> dict[str, list[str]]:
        return {
            "vit": [self.paths.vision_tower] if self.paths.vision_tower else [],
            "mlp": [self.paths.projector] if self.paths.projector else [],
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
        for path in (self.paths.projector, self.paths.vision_tower):
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

    def model_inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What of the micro-batch the model's forward takes, besides its first input."""
        return {name: value for name, value in batch.items() if name != "input_ids"}

    def forward(self, hidden_or_ids: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        inputs = self.model_inputs(batch)
        inputs["input_ids" if self.is_first else "inputs_embeds"] = hidden_or_ids
        if self.is_last:
            # the class's own forward: it may scale or cap the logits
            return self.whole(**inputs, use_cache=False).logits
        return self.whole.base_model(**inputs, use_cache=False).last_hidden_state


def _replace(whole: PreTrainedModel, path: str) -> None:
    parent, _, name = path.rpartition(".")
    try:
        setattr(whole.get_submodule(parent), name, PassThrough())
    except AttributeError:
        pass  # its parent went before it: a projector inside a vision tower


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

    part.__doc__ = (
        f"{text}\n\nArgs:\n    attn_implementation: eager, sdpa or another of the library's."
    )
    part.__name__ = part.__qualname__ = key
    part.__module__ = __name__
    train_model_register[key] = part


@train_model_register("causal_lm")
def causal_lm(
    *, attn_implementation: str | None = None, **kwargs: object
) -> tuple[StageModel, object, int]:
    """Any decoder-only model of transformers, split by layers.

    Args:
        attn_implementation: eager, sdpa or another of the library's.
    """
    return CausalLMStage.build(attn_implementation=attn_implementation, **kwargs)


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
    "mixtral": ("mixtral",),
    "qwen3_moe": ("qwen3_moe",),
}

for _key, _model_types in DECODERS.items():
    add_family(
        CausalLMStage, _key, _model_types, f"The {_key} decoder; refuses any other architecture."
    )
