#!/usr/bin/env bash
# Builds a pre-training corpus of several texts, each a type, and shows its contents.
#   bash scripts/build_corpus.sh                   # of the guides of this repository, in a minute
#   bash scripts/build_corpus.sh --num-workers 4   # options are those of `corpus.py write --help`
# For your own text, edit the keys below. After a stop, the same command continues.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

SAVE_PATH="${SAVE_PATH:-$ROOT/.cache/corpus}"
TOKENIZER_PATH="$SAVE_PATH/tokenizer"
# file, folder or pattern of each text (.txt .jsonl .parquet, also .gz .bz2 .zst); its language
FILES=("$SAVE_PATH/english.jsonl" "$SAVE_PATH/chinese.jsonl")
LANGUAGES=(english chinese) # or auto icu none; english for code
SEQ_LENGTH=1024
NAME=guides # name of the corpus

"$PYTHON" "$ROOT/scripts/make_corpus_text.py" "$SAVE_PATH" # drop this line for your own text

PREFIXES=()
TYPES=()
for index in "${!FILES[@]}"; do
    PREFIX="$NAME-$index-${LANGUAGES[$index]}"
    "$PYTHON" "$ROOT/corpus.py" write \
        --file-path "${FILES[$index]}" \
        --save-path "$SAVE_PATH" \
        --save-prefix "$PREFIX" \
        --tokenizer-path "$TOKENIZER_PATH" \
        --language "${LANGUAGES[$index]}" \
        --do-split-sentences \
        --do-keep-newlines \
        --seq-length "$SEQ_LENGTH" \
        --overwrite \
        "$@"
    PREFIXES+=("$SAVE_PATH/$PREFIX")
    TYPES+=("$index")
done

"$PYTHON" "$ROOT/corpus.py" merge \
    --merge-path-prefix "${PREFIXES[@]}" \
    --merge-path-type "${TYPES[@]}" \
    --new-path-prefix "$SAVE_PATH/$NAME" \
    --overwrite
"$PYTHON" "$ROOT/corpus.py" stats --read-path-prefix "$SAVE_PATH/$NAME"
