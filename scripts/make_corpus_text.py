"""Make the input of scripts/build_corpus.sh: the guides of this repository as JSON lines, one file
per language, and a small tokenizer trained on them. Does nothing if all files exist.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
VOCAB_SIZE = 8192


def guides() -> dict[str, list[str]]:
    """Return language -> documents."""
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md")])
    pages = [page for page in pages if not page.parent.name.startswith(".")]
    found: dict[str, list[str]] = {"english": [], "chinese": []}
    for page in pages:
        language = "chinese" if page.name.endswith(".zh.md") else "english"
        found[language].append(page.read_text(encoding="utf-8"))
    rows = (ROOT / "data" / "manpages_instruct.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, rows):
        found["english"].append(f"{row['question']}\n{row['answer']}")
    return found


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos
    )


def main(target: str) -> None:
    folder = Path(target)
    if (folder / "tokenizer" / "tokenizer.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    documents = guides()
    for language, texts in documents.items():
        with (folder / f"{language}.jsonl").open("w", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    tokenizer = train_tokenizer(text for texts in documents.values() for text in texts)
    tokenizer.save_pretrained(folder / "tokenizer")  # last: marks a complete folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder of the texts and the tokenizer")
    main(parser.parse_args().folder)
