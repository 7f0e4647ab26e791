"""--preview shows what a run trains on: tokens, which of them are in the loss, their source."""

import functools
import io
import json

import pytest

from dataset import sft
from prompt_fn import chat
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.batches.preview import Shown, bracket, preview, split
from tests.helpers.collating import collate_options
from tests.helpers.small_run import Job
from tests.helpers.tiny_models import tiny_tokenizer


class Rows:
    """Ten conversations; the last ones are long."""

    def __len__(self):
        return 10

    def __getitem__(self, row):
        turns = [
            {"role": "user", "content": f"Which digit {row}?" + " what" * (row > 7) * 30},
            {"role": "assistant", "content": f"是{row} <|im_end|>"},
        ]
        return [], {"id": str(row), "source": f"rows.jsonl:{row + 1}", "messages": turns}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def loader_of(tokenizer, **options):
    common = {"prompt": "", "prompt_fn": chat, "max_token_num": 70, "stage": 1, "num_stages": 2}
    collate = functools.partial(sft, **collate_options(tokenizer, overlong="cut_prompt", **common))
    return MicroBatchLoader(
        Rows(), collate=collate, batch_size=10, micro_batch_size=2, shuffle=False, **options
    )


def shown_by(tokenizer, count, **options):
    stream = io.StringIO()
    full = options.pop("full_length", None)
    preview(
        loader_of(tokenizer, **options), Rows(), tokenizer,
        count=count, full_length=full, stream=stream,
    )  # fmt: skip
    return stream.getvalue()


@pytest.mark.parametrize("packing", [70])
def test_samples_are_those_that_are_trained_on(tokenizer, packing):
    text = shown_by(tokenizer, 10, packing=packing, order="given")
    for row in range(10):
        assert f"rows.jsonl:{row + 1}: sample {row}, row {row}, " in text
        assert f"assistant\n[[是{row} <|im_end|><|im_end|>]]\n" in text
    assert "<pad>" not in text and "\x1b" not in text
    # figures are those of the loader's micro-batches
    batches = next(iter(loader_of(tokenizer, packing=packing, order="given")))
    assert sum(len(shown.input_ids) for batch in batches for shown in split(batch)) == sum(
        int(batch["attention_mask"].sum()) for batch in batches
    )


def test_counts(tokenizer):
    text = shown_by(tokenizer, 1, order="given", full_length=lambda row: 99)
    batch = next(iter(loader_of(tokenizer, order="given")))[0]
    tokens, learnt = int(batch["attention_mask"][0].sum()), int((batch["labels"][0] >= 0).sum())
    share = round(100 * learnt / tokens)
    assert f"{tokens} tokens, {learnt} learnt ({share} %), cut from 99 tokens" in text
    assert "sample 2" not in text


def test_what_would_steer_a_terminal_is_written_out(tokenizer):
    ids = tokenizer("a\x1b[2Jb", add_special_tokens=False)["input_ids"]
    assert bracket(Shown(0, ids, [False] * len(ids)), tokenizer) == "a\\x1b[2Jb"


def test_a_run_shows_its_samples_once_and_needs_no_weights(tmp_path):
    job = Job(tmp_path, num_rows=16)
    (job.model / "model.safetensors").unlink()
    rows = [{"messages": turns} for _, turns in (("", Rows()[n][1]["messages"]) for n in range(16))]
    job.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--prompt-fn", "chat", "--prompt", "chat", "--max-token-num", "200")
    paths = ("--config-path", job.model, "--model-path", "")
    done = job.fork("shown", *words, *paths, "--preview", "2", "--check-only")
    assert done.code == 0, done.err
    assert done.out.count("-- sample 1 of 2: ") == done.out.count("-- sample 2 of 2: ") == 1
    assert done.out.count("<|im_end|><|im_end|>]]") == 2
    assert not (tmp_path / "shown").exists()
