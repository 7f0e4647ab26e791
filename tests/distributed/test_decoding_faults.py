"""Decoding on real ranks when something goes wrong on one: a pass that raises ends its requests,
a rank that is lost ends all ranks within seconds, and the cause is the first line.

tests/unit/test_decoding_faults.py has the same over stages in one process, and much more.
"""

from pathlib import Path

import pytest
import torch

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.checkpoint.load import quiet
from stageline.inference.decoding.request import Failed, Request, Sampling
from tests.helpers.decoded_models import decoded_text_model
from tests.helpers.decoding_engines import on_ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.warm_start import WarmLauncher

ENTRY = Path(__file__).with_name("decoding_entry.py")
SECONDS = 60  # a rank that waits for a lost one would wait for days
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with quiet():
        return decoded_text_model(
            "llama", tmp_path_factory.mktemp("llama"), num_prompts=6, num_tokens=NUM_TOKENS
        )


def answers_with_a_fault(rank, model, fails_at):
    with quiet():
        stage = train_model_register["llama"](
            config_path=None,
            processor_path=None,
            checkpoint_path=str(model.folder),
            stage=rank,
            num_stages=2,
        )[0]
    if rank == 1:
        layer = next(one for index, one in stage.layer_list() if index in stage.layers)
        forward, calls = layer.mlp.forward, iter(range(10**9))

        def spoiled(*args):
            if next(calls) in fails_at:
                raise torch.OutOfMemoryError("no room, on purpose")
            return forward(*args)

        layer.mlp.forward = spoiled

    def work(engine):
        sampling = Sampling(max_new_tokens=NUM_TOKENS, stop_token_ids=())
        requests = [Request(str(i), one, sampling) for i, one in enumerate(model.prompts)]
        return [
            (one.key, str(one.error) if isinstance(one, Failed) else list(one.token_ids))
            for _ in range(2)
            for one in engine.answer(requests)
        ]

    return on_ranks(stage, model.processor, work, max_rows=4, num_groups=2)


def test_a_pass_that_fails_on_the_second_rank_ends_its_rows_alone(model):
    found = run_ranks(answers_with_a_fault, 2, model, (1, 6))[0]
    assert len(found) == 12
    failed = [(key, told) for key, told in found if isinstance(told, str)]
    assert 2 <= len(failed) <= 4
    assert {told for _, told in failed} == {"stage 1: OutOfMemoryError: no room, on purpose"}
    for key, told in found:
        assert isinstance(told, str) or tuple(told) == model.answers[int(key)]
    assert all(not isinstance(told, str) for _, told in found[6:]), "afterwards all is well"


@pytest.mark.timeout(3 * SECONDS)
def test_a_lost_rank_ends_all_and_is_named_first(model):
    run = WarmLauncher([str(ENTRY), str(model.folder)], {"OMP_NUM_THREADS": "1"})
    done = run.finish(SECONDS)
    assert done.code == 9
    line = "error[crash] rank=1 stage=1: killed by signal 9 (SIGKILL"
    assert done.err.startswith(line), done.err
    assert "onnection" not in done.err and done.err.count("Traceback") <= 1
