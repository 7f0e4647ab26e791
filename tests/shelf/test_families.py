"""A sample of the sweep over all families (benchmarks/families.py), and that it can fail.

Three stages; the head tied or not, as the family has it. The whole sweep makes docs/models.md.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.families import KINDS, build_stage
from benchmarks.families_split import Family, judge, make_family
from pp_models import CausalLMStage
from stageline.errors import UserError
from stageline.shrink import shrink_config
from tests.helpers.family_configs import family_config

TEXT = [
    *("granite", "granitemoehybrid", "lfm2", "mamba2", "biogpt", "nanochat", "zamba2"),
    *("gemma3n_text", "falcon", "bloom", "gptj", "bamba", "falcon_h1", "nemotron_h"),
    *("llama4_text", "opt", "gpt_oss", "deepseek_v3", "glm4_moe"),
]
VISION = ["qwen3_vl_moe", "qwen3_5", "glm4v", "lfm2_vl", "mistral3", "paligemma"]


def make(kind: str, name: str, folder: Path) -> Family:
    torch.set_num_threads(1)
    auto_class = KINDS[kind][0]
    return make_family(family_config(name), auto_class, folder, name=name, is_tied=None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("text", name) for name in TEXT), *(("vision", name) for name in VISION)],
)
def test_stages_compute_what_the_whole_model_computes(kind: str, name: str, tmp_path: Path) -> None:
    verdict = judge(make(kind, name, tmp_path), build_stage, num_stages=3)
    assert verdict.said == "equal", verdict


def test_a_multiplier_that_runs_twice_is_found(tmp_path: Path) -> None:
    family = make("text", "granite", tmp_path)
    factor = family.whole.config.embedding_multiplier

    def build(folder: Path, stage: int, num_stages: int, dtype: torch.dtype) -> torch.nn.Module:
        model = build_stage(folder, stage, num_stages, dtype)
        plain = model.forward
        if stage:
            model.forward = lambda hidden, *more, **batch: plain(hidden * factor, *more, **batch)
        return model

    verdict = judge(family, build, num_stages=2)
    assert verdict.said == "WRONG" and verdict.largest > 0.01, verdict


def test_a_gradient_that_is_lost_is_found(tmp_path: Path) -> None:
    family = make("text", "granite", tmp_path)

    def build(folder: Path, stage: int, num_stages: int, dtype: torch.dtype) -> torch.nn.Module:
        model = build_stage(folder, stage, num_stages, dtype)
        if stage:
            model.whole.model.layers[2].self_attn.k_proj.weight.requires_grad_(False)
        return model

    verdict = judge(family, build, num_stages=2)
    assert verdict.said == "WRONG" and "layers.2.self_attn.k_proj" in verdict.detail, verdict


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("t5", {}, "AutoModelForCausalLM has no model for t5"),
        ("bert", {"is_decoder": False}, "is_decoder is false in the configuration of bert"),
        ("xlm", {"causal": False}, "causal is false in the configuration of xlm"),
        ("xlnet", {}, "attn_type is bi in the configuration of xlnet"),
    ],
)
def test_what_is_no_decoder_is_refused(name: str, fields: dict, said: str) -> None:
    config = shrink_config(family_config(name), num_layers=2)
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(UserError, match=said):
        CausalLMStage(config, stage=0, num_stages=1)
