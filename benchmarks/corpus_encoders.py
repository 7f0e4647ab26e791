"""Builds of a corpus by tiktoken and by the tokenizers library: CPU seconds of one worker.

python benchmarks/corpus_text.py                     # once: gathers the text
python benchmarks/corpus_encoders.py --megabytes 10

Both build the same documents in turn, round after round, from the cutter's load to the last file;
tokenizers runs on one thread. `encode` is encoding only. CPU seconds hold on a loaded machine too.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
KINDS = ("auto", "tokenizers")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the children that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def make_cutter(tokenizer: str, kind: str, language: str):
    """Return the cutter of a build."""
    from stageline.corpus import sentences
    from stageline.corpus.cut import DocumentCutter
    from stageline.corpus.encoder import load_encoder
    from stageline.corpus.header import CutRules

    encoder = load_encoder(tokenizer, kind=kind)
    return DocumentCutter(encoder, getattr(sentences, language), CutRules(1024))


def timed(task) -> tuple[float, float]:
    """Run a task; return its CPU seconds and its wall seconds."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    task()
    return cpu_seconds() - cpu, time.perf_counter() - wall


def build(path: Path, folder: Path, tokenizer: str, kind: str, language: str) -> None:
    """Build a corpus with one worker."""
    from stageline.corpus.build import build_corpus

    build_corpus(
        [str(path)],
        path_prefix=str(folder / kind),
        make_cutter=functools.partial(make_cutter, tokenizer, kind, language),
        language=language,
        num_workers=1,
        overwrite=True,
        progress=False,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=ROOT / ".cache/corpus-text")
    parser.add_argument("--tokenizer", default=str(ROOT / ".cache/smollm2"))
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    import transformers  # noqa: F401  imported before the clock starts

    from stageline.corpus.encoder import load_encoder

    print("| text | MB | | CPU s: auto | tokenizers | ratio (of the rounds) | wall s |")
    print("|---|---|---|---|---|---|---|")
    for language in ("english", "chinese"):
        texts, size = [], 0
        with open(given.text / f"{language}.jsonl", encoding="utf-8") as lines:
            for line in lines:
                texts.append(json.loads(line)["text"])
                size += len(texts[-1].encode())
                if size > given.megabytes * 1e6:
                    break
        encoders = {kind: load_encoder(given.tokenizer, kind=kind) for kind in KINDS}
        assert [encoder.kind for encoder in encoders.values()] == ["tiktoken", "tokenizers"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            tasks = {
                "build": lambda kind, path=path, language=language: build(
                    path, path.parent, given.tokenizer, kind, language
                ),
                "encode": lambda kind, texts=texts, encoders=encoders: encoders[kind].encode(texts),
            }
            for name, task in tasks.items():
                took = {kind: [] for kind in KINDS}
                for _ in range(given.rounds):
                    for kind in KINDS:
                        took[kind].append(timed(functools.partial(task, kind)))
                cpu = {kind: [one for one, _ in took[kind]] for kind in KINDS}
                wall = [statistics.median(one for _, one in took[kind]) for kind in KINDS]
                ratios = [b / a for a, b in zip(*cpu.values(), strict=True)]
                middle = [statistics.median(cpu[kind]) for kind in KINDS]
                print(
                    f"| {language} | {size / 1e6:.1f} | {name} | {middle[0]:.1f} | {middle[1]:.1f} "
                    f"| {middle[1] / middle[0]:.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
                    f"| {wall[0]:.1f}, {wall[1]:.1f} |",
                    flush=True,
                )
            same = [(Path(folder) / f"{kind}.bin").read_bytes() for kind in KINDS]
            assert same[0] == same[1], "both give the same files"


if __name__ == "__main__":
    main()
