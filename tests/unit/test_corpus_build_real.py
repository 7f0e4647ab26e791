"""Real documents go through the whole build, killed and with several workers, and come back."""

import functools
import json
import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from stageline.corpus.build import build_corpus
from stageline.corpus.corpus_files import Corpus
from stageline.corpus.cut import DocumentCutter
from stageline.corpus.encoder import load_encoder
from stageline.corpus.header import CutRules
from stageline.corpus.sentences import auto
from tests.helpers import faults
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 128


@pytest.fixture(scope="module")
def documents():
    """Guides, English and Chinese, whole and by their sections."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))[:12]]
    return texts + [part for text in texts for part in text.split("\n## ") if part]


@pytest.fixture(scope="module")
def file(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def make_cutter(folder):
    return DocumentCutter(load_encoder(folder), auto, CutRules(LIMIT))


def build(file, prefix, folder, num_workers):
    return build_corpus(
        file,
        path_prefix=prefix,
        make_cutter=functools.partial(make_cutter, folder),
        num_workers=num_workers,
        progress=False,
        chunk_bytes=30_000,
        seconds_a_journal=0.0,
    )


def _killed(fault, *args):
    os.environ[faults.VARIABLE] = fault
    faults.arm()
    build(*args)


@pytest.mark.parametrize(("kind", "workers"), [("bytes", (0, 1, 2)), ("metaspace", (0, 2))])
def test_real_documents_come_back_from_every_build(kind, workers, file, documents, tmp_path):
    if kind == "bytes":
        tokenizer = tiny_tokenizer(documents, vocab_size=900)
    else:
        # nothing is put before a text, so that it comes back as it was
        tokenizer = tiny_metaspace_tokenizer(documents, prepend_scheme="never", adds_bos=False)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    found = []
    for num_workers in workers:
        prefix = tmp_path / f"corpus{num_workers}"
        args = (file, prefix, tmp_path / "tokenizer", num_workers)
        if num_workers:
            fault = f"at=corpus_chunk,do=sigkill,count={2 * num_workers}"
            child = get_context("fork").Process(target=_killed, args=(fault, *args))
            child.start()
            child.join(100)
            assert child.exitcode == -signal.SIGKILL
        report = build(*args)
        assert (report.num_bytes_before > 0) == bool(num_workers)
        found.append([Path(f"{prefix}{name}").read_bytes() for name in (".bin", ".idx", ".dis")])
    assert all(files == found[0] for files in found)
    corpus, encoder = Corpus(tmp_path / "corpus2"), load_encoder(tmp_path / "tokenizer")
    assert corpus.lengths().max() <= LIMIT < corpus.lengths().sum() / len(documents)
    texts = [encoder.decode(corpus.document_tokens(*of)) for of in corpus.documents()]
    assert texts == documents
