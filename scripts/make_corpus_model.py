"""Write a small Llama without weights for the tokenizer of a corpus: config and tokenizer."""

import argparse
from pathlib import Path

from transformers import AutoTokenizer, LlamaConfig

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 256
LONGEST = 1024  # tokens of a row
TOKENIZER = str(ROOT / ".cache" / "corpus" / "tokenizer")  # scripts/build_corpus.sh makes it


def main(folder: str, tokenizer_path: str) -> None:
    """Write six layers: 9 M parameters with a vocabulary of 8,192."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"model configuration and tokenizer are in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder of the model")
    parser.add_argument(
        "tokenizer", nargs="?", default=TOKENIZER, help="folder of the tokenizer (%(default)s)"
    )
    given = parser.parse_args()
    main(given.folder, given.tokenizer)
