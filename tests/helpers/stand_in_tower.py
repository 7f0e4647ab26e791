"""A small tower in the place of one that timm makes, which may be missing.

Splits of a model around such a tower can be tried then; the tower itself cannot.
"""

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nVisionConfig
from transformers.utils import is_timm_available

SIDE = 4  # rows and columns of features, whatever the size of a picture
STRIDE = 16


class StandInTower(PreTrainedModel):
    """Pictures [N, 3, height, width] -> features [N, hidden size, 4, 4]."""

    config_class = Gemma3nVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.patches = nn.Conv2d(3, config.hidden_size, STRIDE, STRIDE)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor, **_: object) -> BaseModelOutputWithPooling:
        features = adaptive_avg_pool2d(self.patches(pixel_values), SIDE)
        return BaseModelOutputWithPooling(last_hidden_state=features)


def stand_in_for_timm() -> None:
    """Build later Gemma 3n models around this tower, where timm is missing."""
    if not is_timm_available():
        AutoModel.register(Gemma3nVisionConfig, StandInTower, exist_ok=True)
