"""A folder of a decoder with its own code, like those of models on the hub (`auto_map`)."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.tiny_models import tiny_tokenizer

_NUMBERS = itertools.count()  # transformers caches modules of code by the name of their folder

CONFIGURATION = """
from transformers import PretrainedConfig


class ParrotConfig(PretrainedConfig):
    model_type = "parrot"

    def __init__(self, vocab_size=400, hidden_size=16, num_hidden_layers=6, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)
"""

MODELING = '''
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_parrot import ParrotConfig


class ParrotLayer(nn.Module):
    """Means over the tokens so far, and a perceptron."""

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, weights):
        hidden = hidden + self.mix(weights @ self.norm(hidden))
        return hidden + torch.tanh(self.mlp(hidden))


class ParrotPreTrained(PreTrainedModel):
    config_class = ParrotConfig
    base_model_prefix = "model"
    _no_split_modules = ["ParrotLayer"]

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            INIT
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)


class ParrotModel(ParrotPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ParrotLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embed_tokens(input_ids)
        size = input_ids.shape[1]
        seen = torch.ones(size, size, dtype=torch.bool, device=hidden.device).tril()[None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, :].bool()
        weights = seen.to(hidden.dtype)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            hidden = layer(hidden, weights)
        return self.norm(hidden)


class ParrotForCausalLM(ParrotPreTrained, GenerationMixin):
    _tied_weights_keys = TIED

    def __init__(self, config):
        super().__init__(config)
        self.model = ParrotModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, FORWARD
'''

FORWARD = """input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids, attention_mask)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))"""

INITS = {
    "nn.init": "nn.init.normal_(module.weight, std=0.3)",
    ".data": "module.weight.data.normal_(0.0, 0.3)",
}
TIED = {
    "a list": '["lm_head.weight"]',  # code written for transformers 4 has a list
    "a map": '{"lm_head.weight": "model.embed_tokens.weight"}',
}


def remote_model(
    folder: Path,
    *,
    init: str = ".data",
    tied: bool = False,
    keys: str = "a map",
    seed: int | None = 0,
    has_tokenizer: bool = True,
    forward: str = FORWARD,
    **fields: Any,
) -> Path:
    """Writes config, code, tokenizer and weights of a decoder.

    Args:
        init: how its `_init_weights` draws, a key of INITS.
        tied: embedding and head share their weight.
        keys: how its code names tied weights, a key of TIED.
        seed: of the weights; None: there are none.
        forward: arguments and body of its forward.
        fields: of the config.
    """
    folder = folder.with_name(f"{folder.name}_{next(_NUMBERS)}")
    folder.mkdir(parents=True)
    code: Mapping[str, str] = {
        "configuration_parrot.py": CONFIGURATION,
        "modeling_parrot.py": MODELING.replace("INIT", INITS[init])
        .replace("TIED", TIED[keys])
        .replace("FORWARD", forward),
    }
    for name, text in code.items():
        (folder / name).write_text(text)
    settings = {
        "model_type": "parrot",
        "architectures": ["ParrotForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_parrot.ParrotConfig",
            "AutoModelForCausalLM": "modeling_parrot.ParrotForCausalLM",
        },
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    if has_tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    if seed is not None:
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        whole = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        whole.save_pretrained(folder)
    return folder
