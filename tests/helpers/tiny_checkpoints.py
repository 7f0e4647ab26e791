"""Tiny whole models with weights that hide no mistake, saved by transformers itself."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from commands.stages import stage_key
from pp_models import StageModel, class_of_key
from stageline.checkpoint.load import fill_stage
from stageline.model_folder import load_config
from stageline.modules.new_rows import NewRows
from tests.helpers.tiny_models import VISION_LANGUAGE, tiny_config

SHARD_SIZE = "20KB"  # several files even for a tiny model


class OwnStage(StageModel):
    """A user's model without transformers: four linear layers."""

    def __init__(self, config: None = None, **options: object) -> None:
        super().__init__(config, **options)
        with torch.device("meta"):
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(4, 4) if index in self.layers else torch.nn.Identity()
                for index in range(4)
            )

    def num_layers(self) -> int:
        return 4

    def parts(self) -> dict[str, list[str]]:
        return {"llm": ["layers"]}


def auto_class(family: str) -> type:
    """Return transformers' class that builds a whole model of a tiny family."""
    if family in VISION_LANGUAGE:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def tiny_whole(
    family: str,
    folder: Path | None = None,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = SHARD_SIZE,
    noise: float = 0.05,
    **overrides: object,
) -> PreTrainedModel:
    """Make a whole model in evaluation mode, saved to `folder` by plain `save_pretrained`.

    transformers starts biases and norms at 0 and 1, which hides weights that were swapped or left
    out: here they are moved.

    Args:
        noise: how far; more makes answers that differ more from prompt to prompt.
        overrides: fields of the (text) configuration.
    """
    torch.manual_seed(3)
    whole = auto_class(family).from_config(tiny_config(family, tied=tied, **overrides), dtype=dtype)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    if folder is not None:
        whole.save_pretrained(folder, max_shard_size=max_shard_size)
    return whole.eval()


def load_stages(
    base: str | Path,
    checkpoint: str | Path | None = None,
    num_stages: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    new_rows: NewRows | None = None,
    **options: object,
) -> list[StageModel]:
    """Stages of a model folder, filled from it or from `checkpoint`, frozen by their options."""
    stages = []
    for stage in range(num_stages):
        config = load_config(base)
        stage_class = class_of_key(stage_key(config))
        model = stage_class(config, stage=stage, num_stages=num_stages, dtype=dtype, **options)
        path = str(checkpoint or base)
        fill_stage(model, path, dtype=dtype, new_rows=new_rows)
        stages.append(model)
    return stages


@torch.no_grad()
def shake(stages: list[StageModel], seed: int = 0) -> list[StageModel]:
    """Changes what trains, as a run would; by names, so a tied weight alike on both stages."""
    for model in stages:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                generator = torch.Generator().manual_seed(seed + len(name) + parameter.numel())
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return stages
