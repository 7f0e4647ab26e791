"""A table of the start model that is broken off is gone on with, and not begun anew."""

import pytest
import torch

from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.pipeline.runner import PipelineRunner
from stageline.training import reference
from stageline.training.reference import TableMaker
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

CPU = torch.device("cpu")


def build():
    model = CausalLMStage(tiny_config("llama"), stage=0, num_stages=1)
    init_split_model(model, seed=1, device="cpu", dtype=torch.float32)
    return model


def make_batches():
    """Three batches of one pair each, and one that only fills up."""
    batches = []
    for number, batch in enumerate(tiny_micro_batches("llama", rows=4)[:3]):
        pairs = torch.arange(4) // 2
        rows = torch.tensor([number, number, -1, -1])
        batches.append({**batch, "loss_pairs": pairs, "loss_rows": rows})
    return batches


def make_table(rank, folder):
    """A table that is broken off after two of three batches, then made to its end."""
    reference.SAVE_EVERY = 1
    runner = PipelineRunner([build()], device=CPU, schedule="1f1b")
    batches = make_batches()

    def steps(last):
        for number, batch in enumerate(batches):
            assert number <= last, "killed"
            yield [batch]

    def make(name, last):
        table = TableMaker(runner, path=folder / name, key="k", needs_kl=False)
        source = table(steps(last), num_samples=3, num_batches=3, is_start=True)
        return source.values

    whole = make("whole.safetensors", 3)
    with pytest.raises(AssertionError, match="killed"):
        make("t.safetensors", 1)
    with torch.no_grad():
        for parameter in runner.local.models[0].parameters():
            parameter.mul_(1.5)  # what is done again is seen
    values = make("t.safetensors", 3)
    same = (values == whole).all(dim=1).tolist()
    return same, sorted(path.name for path in folder.iterdir())


def test_a_table_goes_on_where_it_was_broken_off(tmp_path):
    ((same, files),) = run_ranks(make_table, 1, tmp_path)
    assert same == [True, True, False]
    assert files == ["t.safetensors", "whole.safetensors"]
