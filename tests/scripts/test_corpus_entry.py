"""corpus.py: text in, a corpus out; read, merged, thinned out, checked, converted."""

import json
import re
import shlex
from pathlib import Path

import numpy
import pytest
import yaml
from PIL import Image
from transformers import AutoTokenizer

from commands import corpus
from parse_args import parse_corpus_args
from register import dataset_register, import_shelf
from stageline.corpus.corpus_files import open_corpus
from stageline.errors import DataError, UserError
from tests.helpers.forked_entry import run_entry
from tests.helpers.tiny_models import tiny_tokenizer

import_shelf("corpus_parts", "dataset")
ROOT = Path(__file__).resolve().parents[2]
LINES = [
    "One sentence. " * 30 + "<|im_end|> stays text.",
    "A short document.",
    "Dr. Who came at 5 p.m. He left.",
    "  spaces\tand tabs  ",
]
DOCUMENTS = [
    "第一句。第二句很长，" * 12 + "完。\n\n新的一段。",
    "短文。",
    "English, too.\nLine two.",
]
WRITE = (
    "write --file-path ./data/{0} --save-prefix {1} --save-path ./data/ --language {2} "
    "--do-split-sentences --do-keep-newlines --seq-length 64 --num-workers 0 --tokenizer-path T"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a text of lines, JSON lines, a tokenizer T, and a corpus of each text."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "data").mkdir()
    tiny_tokenizer([*LINES, *DOCUMENTS]).save_pretrained(folder / "T")
    (folder / "data" / "dataset1.txt").write_text("\n".join(LINES) + "\n")
    rows = [{"instruction": text[:5], "output": text[5:]} for text in DOCUMENTS]
    (folder / "data" / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        do(WRITE.format("dataset1.txt", "dataset1", "english"))
        fields = " --document.fields instruction,output --document.separator ''"
        do(WRITE.format("b.jsonl", "b", "chinese") + fields)
    return folder


@pytest.fixture
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def do(words):
    """One action, in this process."""
    arguments = parse_corpus_args(shlex.split(words))
    corpus.ACTIONS[arguments.action](arguments)


def test_the_line_of_the_notes_runs_as_a_program(inside):
    """Another name, several processes, low lines: the same bytes; then nothing is overwritten."""
    words = shlex.split(WRITE.format("dataset1.txt", "again", "english"))
    words[words.index("--num-workers") + 1] = "2"
    words = [word.replace("-", "_").replace("__", "--", 1) for word in words]
    assert "--do_split_sentences" in words
    done = run_entry([ROOT / "corpus.py", *words])
    assert done.returncode == 0, done.stderr
    assert "4 documents" in done.stdout
    for suffix in (".bin", ".dis", ".tmp"):
        mine, other = (Path(f"data/{name}{suffix}") for name in ("again", "dataset1"))
        assert mine.read_bytes().replace(b"again", b"dataset1") == other.read_bytes()
    assert open_corpus("data/again").digest == open_corpus("data/dataset1").digest
    with pytest.raises(UserError, match="--overwrite"):
        do(shlex.join(words))


@pytest.mark.parametrize(
    ("prefix", "options", "wanted"),
    [
        ("dataset1", "", "".join(f"{line}\n" for line in LINES)),
        ("dataset1", "--start 1 --limit 2", "".join(f"{line}\n" for line in LINES[1:3])),
        ("dataset1", "--json --start 3", json.dumps({"text": LINES[3]}) + "\n"),
        ("b", "", "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n"
                          for text in DOCUMENTS)),
    ],
)  # fmt: skip
def test_documents_come_back_to_the_byte(inside, tmp_path, prefix, options, wanted, capsys):
    words = f"read --read-path-prefix data/{prefix} --text --tokenizer-path T {options}"
    do(words)
    assert capsys.readouterr().out == wanted
    do(words.replace("--tokenizer-path T", ""))  # it is found where it was
    assert capsys.readouterr().out == wanted
    do(f"{words} --output-path {tmp_path}/out")
    assert (tmp_path / "out").read_text() == wanted
    with pytest.raises(UserError, match="is there. Give another name"):
        do(f"{words} --output-path {tmp_path}/out")


def test_read_refuses_what_cannot_be_right(inside, tmp_path, monkeypatch):
    with monkeypatch.context() as moved:
        moved.setattr(Path, "is_file", lambda path: False)
        with pytest.raises(UserError, match="--text requires --tokenizer-path.*was in /.*/T"):
            do("read --read-path-prefix data/b --text")
    with pytest.raises(DataError, match="document 0 has several lines.*--json"):
        do("read --read-path-prefix data/b --text --json false --tokenizer-path T")
    tiny_tokenizer(["another"]).save_pretrained(tmp_path / "U")
    with pytest.raises(DataError, match="another tokenizer than that of the corpus, T"):
        do(f"read --read-path-prefix data/b --tokenizer-path {tmp_path}/U")


def test_merge_stats_verify(inside, capsys):
    do("merge --merge-path-prefix data/dataset1 data/b --merge-path-type 0 1 "
       "--new-path-prefix ./data/both")  # fmt: skip
    parts = [open_corpus(f"data/{name}") for name in ("dataset1", "b")]
    both = open_corpus("data/both")
    assert "type 1, b:" in capsys.readouterr().out
    assert both.type_starts.tolist() == [0, len(parts[0]), len(parts[0]) + len(parts[1])]
    do("read --read-path-prefix data/both --type 1 --text --tokenizer-path T")
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts == DOCUMENTS
    do("verify --read-path-prefix data/both --tokenizer-path T")
    assert "is whole" in capsys.readouterr().out
    do("stats --read-path-prefix data/both")
    shown = capsys.readouterr().out
    tokens = both.header.num_tokens
    assert re.search(rf"\n  all +{len(both)} +{tokens:,} +100.0%", shown), shown
    padding = 1 - tokens / (64 * len(both))
    assert re.search(rf"a segment a row +{padding:.2%}".replace("%", "%"), shown)
    with Image.open("data/both.stats.png") as picture:
        assert picture.width > 600
    do("stats --read-path-prefix data/both --json --plot-path data/p.png")
    figures = json.loads(capsys.readouterr().out)
    assert sum(figures["all"]["histogram"].values()) == len(both) and Path("data/p.png").exists()
    damaged = bytearray(Path("data/both.bin").read_bytes())
    damaged[-1] ^= 1
    Path("data/both.bin").write_bytes(damaged)
    with pytest.raises(DataError, match="both.bin"):
        do("verify --read-path-prefix data/both")


def test_what_a_run_has_seen_is_found(inside, tmp_path):
    """Use the sampler that a run draws with, after steps of two replicas, then of one."""
    for name, count in (("many", 40), ("more", 30)):
        lines = [f"{'a b ' * (number % 9)}{number}\n" for number in range(count)]
        Path(f"data/{name}.txt").write_text("".join(lines))
        do(WRITE.format(f"{name}.txt", name, "auto") + " --overwrite")
    do("merge --merge-path-prefix data/many data/more --merge-path-type 0 1 "
       f"--new-path-prefix {tmp_path}/c")  # fmt: skip
    mixture = {"global_batch_distributed": [1, 1], "drop_mode": "first_ends_drop"}
    part = dataset_register["corpus"](dataset_path=f"{tmp_path}/c", rows="packed", **mixture)
    options = {"seed": 5, "shuffle": True, "dp_rank": 0}
    sampler = part.make_sampler(
        batch_size=1, step_samples=2, dp_degree=2, start_step=0, position=None, **options
    )
    seen = {row for row, _ in zip(flat(sampler), range(1)) for row in row}
    position = sampler.state_after(1)
    sampler = part.make_sampler(
        batch_size=2, step_samples=2, dp_degree=1, start_step=1, position=position, **options
    )
    seen |= {row for shares, _ in zip(sampler.shares(1), range(2)) for row in sum(shares, [])}
    segments = sorted(seen_segments(part, seen))
    assert 0 < len(segments) < len(part.corpus)

    run_path = tmp_path / "run"
    state = run_path / "checkpoints" / "step-00000003" / "training_state"
    state.mkdir(parents=True)
    facts = {"step": 3, "position": sampler.state_after(3)}
    saved = {"facts": facts, "parameters": {}, "extras": {}, "optimizer": "adamw"}
    (state / "state.json").write_text(json.dumps(saved))
    config = {
        "dataset": "corpus", "dataset-path": f"{tmp_path}/c", "dataset.rows": "packed",
        "drop-mode": "0",
        "global-batch-distributed": [1, 1], "seed": 5, "batch-size": 2, "total-steps": 9,
        "dp-degree": None, "learning-rate": 0.1,
    }  # fmt: skip
    (run_path / "config.yaml").write_text(yaml.safe_dump(config))
    for path in (run_path, state.parent):
        do(f"find-trained --run-path {path} --save-path {tmp_path}/seen.npy")
        assert numpy.load(tmp_path / "seen.npy").tolist() == segments
    do(
        f"find-trained --read-path-prefix {tmp_path}/c --dataset.rows packed --seed 5 "
        f"--batch-size 2 --steps 2 --global-batch-distributed 1,1 --save-path {tmp_path}/two.txt"
    )
    two = [int(line) for line in (tmp_path / "two.txt").read_text().splitlines()]
    assert set(two) < set(segments)


def flat(sampler):
    return (sum(shares, []) for shares in sampler.shares(0))


def seen_segments(part, rows):
    places = [part.place_of(row) for row in rows]
    return [n for at in places for n in part.packed[at].tolist()]


MY_PARTS = """
import numpy
from register import document_register, splitter_register

@document_register("mine")
def mine(row, *, least: int = 0):
    return row["output"] if len(row["output"]) >= least else ""

@splitter_register("words")
def words(text):
    ends = [place for place, letter in enumerate(text) if letter == " " and place]
    return numpy.array([*ends, len(text)])
"""


def test_parts_of_a_user_reach_the_workers(inside):
    Path("my_corpus_parts_of_a_test.py").write_text(MY_PARTS)
    words = (
        "write --import my_corpus_parts_of_a_test.py --file-path data/*.jsonl --save-path . "
        "--save-prefix mine --tokenizer-path T --document mine --document.least 3 "
        "--language words --seq-length 16 --num-workers 2 --add-bos false"
    )
    done = run_entry([ROOT / "corpus.py", *words.split()], cwd=inside)
    assert done.returncode == 0, done.stderr
    bad = [json.loads(line) for line in Path("mine.bad.jsonl").open()]
    assert [row["line"] for row in bad] == [2]
    tokenizer, built = AutoTokenizer.from_pretrained("T"), open_corpus("mine")
    assert tokenizer.bos_token_id not in built[0]
    last = tokenizer.decode(built.document_tokens(*list(built.documents())[-1]))
    assert last == DOCUMENTS[2][5:]
    assert built.header.language == "words"


def test_a_build_beside_its_input_does_not_read_its_own_list(inside, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{bad\n')
    for where in (tmp_path, f"{tmp_path}/*.jsonl"):
        do(f"write --file-path '{where}' --save-path {tmp_path} --save-prefix p --overwrite "
           "--tokenizer-path T --num-workers 0")  # fmt: skip
        assert (tmp_path / "p.bad.jsonl").exists()
        assert [source["name"] for source in open_corpus(tmp_path / "p").header.sources] == [
            "a.jsonl"
        ]


def test_a_tokenizer_without_bos_gives_none(inside):
    tokenizer = AutoTokenizer.from_pretrained("T")
    tokenizer.bos_token = None
    tokenizer.save_pretrained("no_bos")
    words = WRITE.format("dataset1.txt", "d", "auto").replace("-path T", "-path no_bos")
    do(words)
    rules = open_corpus("data/d").header.rules
    assert (rules.adds_bos, rules.adds_eos) == (False, True)
    with pytest.raises(UserError, match="has no BOS token"):
        do(words.replace("-prefix d", "-prefix e") + " --add-bos")
