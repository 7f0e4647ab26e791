"""Does every document of the gathered text come back to the byte, also after kill -9?

python benchmarks/corpus_text.py           # once: gathers the text
python benchmarks/corpus_round_trip.py

Each language is built with 1 worker, and each of its documents decoded and compared with the text;
then with 2 workers; then with 2 workers that are killed with -9 when a quarter, a half and three
quarters are written, parent alone or with its workers, and gone on with. All must give the
same files. Ends with 1 at the first difference.
"""

import argparse
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import corpus_workers  # noqa: E402  only after the path is set

LANGUAGES = ("english", "chinese")
_FILES = (".bin", ".idx", ".dis", ".tmp")
_KILLED_AT = (0.25, 0.5, 0.75)


def build(settings: dict) -> None:
    """In a process of its own, so that it can be killed."""
    from stageline.corpus.build import build_corpus

    report = build_corpus(
        settings["file"],
        path_prefix=settings["prefix"],
        make_cutter=functools.partial(corpus_workers.make_cutter, settings),
        language=settings["language"],
        num_workers=settings["workers"],
        seconds_a_journal=0.2,
        progress=False,
    )
    print(report)


def start(settings: dict) -> subprocess.Popen:
    """Begins a build, or goes on with one."""
    command = [sys.executable, __file__, "--build", json.dumps(settings)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    """What the build says at its end."""
    said = process.communicate()[0]
    if process.returncode != 0:
        raise SystemExit(f"the build ended with {process.returncode}: {said}")
    return said.splitlines()[0]


def digests(prefix: str) -> dict[str, str]:
    """sha256 of each file of a corpus."""
    return {end: hashlib.sha256(Path(prefix + end).read_bytes()).hexdigest() for end in _FILES}


def texts_of(file: Path) -> Iterator[str]:
    """The documents."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def num_changed(prefix: str, file: Path, tokenizer: str) -> tuple[int, int, int]:
    """Documents, bytes of text, and documents that did not come back."""
    from stageline.corpus.corpus_files import Corpus
    from stageline.corpus.encoder import load_encoder

    corpus, encoder = Corpus(prefix), load_encoder(tokenizer)
    num_documents = num_bytes = num_changed = 0
    for text, (first, last) in zip(texts_of(file), corpus.documents(), strict=True):
        num_changed += encoder.decode(corpus.document_tokens(first, last)) != text
        num_documents += 1
        num_bytes += len(text.encode())
    return num_documents, num_bytes, num_changed


def build_killed(settings: dict, size: int) -> int:
    """A build that is killed again and again; how often it was."""
    num_kills = 0
    part = Path(settings["prefix"] + ".bin.part")
    for number, share in enumerate(_KILLED_AT):
        process = start(settings)
        while process.poll() is None and _size(part) < share * size:
            time.sleep(0.01)
        if process.poll() is None:
            kill = os.killpg if number % 2 else os.kill  # with its workers, or the parent alone
            kill(process.pid, signal.SIGKILL)
            num_kills += 1
        process.communicate()
    if _size(Path(settings["prefix"] + ".idx")) == 0:
        finish(start(settings))
    return num_kills


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def prove(language: str, file: Path, tokenizer: str, folder: Path) -> bool:
    """Whether all is the same; says what."""
    settings = {"language": language, "file": str(file), "tokenizer": tokenizer}
    runs = {name: str(folder / f"{language}-{name}") for name in ("1", "2", "killed")}
    said = finish(start(settings | {"prefix": runs["1"], "workers": 1}))
    print(f"{language}: {said}")
    counts = num_changed(runs["1"], file, tokenizer)
    print(f"  {counts[0]:,} documents, {counts[1]:,} bytes of text; not come back: {counts[2]:,}")
    expected = digests(runs["1"])
    finish(start(settings | {"prefix": runs["2"], "workers": 2}))
    same = digests(runs["2"]) == expected
    size = Path(runs["1"] + ".bin").stat().st_size
    num_kills = build_killed(settings | {"prefix": runs["killed"], "workers": 2}, size)
    same_killed = digests(runs["killed"]) == expected
    print(f"  2 workers: {'the same' if same else 'OTHER'} files")
    print(f"  killed {num_kills} times: {'the same' if same_killed else 'OTHER'} files")
    return counts[2] == 0 and same and same_killed


def first_part(file: Path, megabytes: float, folder: Path) -> Path:
    """A file with the beginning of it."""
    part, left = folder / file.name, megabytes * 1e6
    with file.open(encoding="utf-8") as lines, part.open("w", encoding="utf-8") as out:
        for line in lines:
            left -= len(line.encode())
            if left < 0:
                break
            out.write(line)
    return part


def main() -> None:
    """Both languages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=ROOT / ".cache/corpus-text")
    parser.add_argument("--tokenizer", default=str(ROOT / ".cache/smollm2"))
    parser.add_argument("--megabytes", type=float, help="of each language; by default all")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.build:
        return build(json.loads(arguments.build))
    with tempfile.TemporaryDirectory(dir=arguments.text) as name:
        right = True
        for language in LANGUAGES:
            file = arguments.text / f"{language}.jsonl"
            if arguments.megabytes:
                file = first_part(file, arguments.megabytes, Path(name))
            right &= prove(language, file, arguments.tokenizer, Path(name))
    return sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
