"""The check of the data: it finds what would stop a run, before a model is loaded."""

import pytest

from prompt_fn import auto, fill
from stageline.data.batches.preflight import check_vocabulary, preflight
from stageline.data.rows.bad_rows import BadRows
from stageline.data.text.processor import load_processor
from stageline.errors import UserError
from tests.helpers.tiny_models import tiny_tokenizer


class Rows:
    """A dataset over a list that counts the rows that are read."""

    def __init__(self, rows):
        self.rows = rows
        self.asked = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        self.asked.append(row)
        return self.rows[row]


def _sample(i, answer="7"):
    return {"id": str(i), "source": f"rows.jsonl:{i + 1}", "question": "q", "answer": answer}


def _preflight(rows, processor, **options):
    defaults = {"prompt": "[IMAGE][QUESTION] [ANSWER]", "max_token_num": 60}
    return preflight(
        rows, prompt_fn=fill, image_token=auto, processor=processor, **{**defaults, **options}
    )


def test_figures_of_good_rows():
    rows = Rows([(None, _sample(i)) for i in range(10)])
    report = _preflight(rows, tiny_tokenizer())
    assert (report.num_rows, report.num_checked, report.longest) == (10, 10, 3)
    assert (report.num_tokens, report.num_targets) == (
        30,
        20,
    )  # "q" is given, " 7" and EOS are trained on
    assert "10 of 10 rows checked: 3 tokens on average, 3 at most" in str(report)
    bad = Rows([*rows.rows, *[(None, {"id": str(i), "answer": "7"}) for i in range(10, 20)]])
    report = _preflight(bad, tiny_tokenizer(), bad_rows=BadRows(10))
    assert len(report.bad) == 10 and "3 tokens on average" in str(report), "of rows that are read"


def test_many_rows_are_sampled_always_the_same():
    asked = []
    for _ in range(2):
        rows = Rows([(None, _sample(i)) for i in range(100)])
        assert _preflight(rows, tiny_tokenizer(), limit=20, seed=3).num_checked == 20
        asked.append(rows.asked)
    assert asked[0] == asked[1] and len(set(asked[0])) == 20


def test_a_tokenizer_larger_than_the_embedding():
    tokenizer = tiny_tokenizer()
    check_vocabulary(tokenizer, len(tokenizer))
    words = (
        f"ids up to {len(tokenizer) - 1} .* has 50 rows.*resize_token_embeddings.{len(tokenizer)}"
    )
    with pytest.raises(UserError, match=words):
        check_vocabulary(tokenizer, 50)
    with pytest.raises(UserError, match="embedding"):
        _preflight(Rows([(None, _sample(0))]), tokenizer, vocab_size=50)


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"--processor-path"):
        load_processor(tmp_path)
