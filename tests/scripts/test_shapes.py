"""Packing from the command line: the same batch, so the same loss; or a clear refusal."""

import pytest
import transformers

from tests.helpers.small_run import Job
from tests.helpers.tiny_models import tiny_tokenizer


def test_packing_trains_on_the_same_batch(tmp_path):
    job, found = Job(tmp_path, num_layers=4), []
    packed = ("--packing", "--rows.pad_to_multiple_of", 8, "--num-workers", 1)
    for name, options in {"plain": (), "packed": packed}.items():
        job.train(name, "--total-steps", 1, *options)
        found += job.records(name)
    plain, packed = found
    assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    for figure in ("num_tokens", "num_targets", "num_samples"):
        assert packed[figure] == plain[figure]


def test_a_model_that_cannot_be_packed_is_refused_at_the_start(tmp_path):
    job = Job(tmp_path, family="causal_lm", make_model=False)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(job.model)
    config = transformers.MambaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2
    )
    transformers.MambaForCausalLM(config).save_pretrained(job.model)
    done = job.fork("refused", "--packing")
    assert done.code == 2 and "Traceback" not in done.err
    assert "--packing" in done.err and "a token sees tokens of another sample" in done.err
