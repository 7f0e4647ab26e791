#!/usr/bin/env bash
# Exports a checkpoint as one plain Hugging Face folder: a model, or an adapter for peft.
#   bash scripts/export.sh --model-path runs/x/checkpoints/step-100 --output-path my_model
# Needs host memory for the whole model. `stageline check --exported my_model --model-path CHECKPOINT`
# compares both. Options: bash scripts/export.sh --help
set -euo pipefail

MERGE=0          # 1 = merge an adapter into its base, which gives a whole model
DTYPE=           # float32, bfloat16 or float16; empty = unchanged

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
if ! command -v "$PYTHON" > /dev/null; then
    echo "error: $PYTHON is missing: run scripts/train_pp.sh once, which makes it, or set PYTHON." >&2
    exit 2
fi
OPTIONS=()
[ "$MERGE" = 1 ] && OPTIONS+=(--merge)
[ -n "$DTYPE" ] && OPTIONS+=(--dtype "$DTYPE")
exec "$PYTHON" "$ROOT/export.py" ${OPTIONS[@]+"${OPTIONS[@]}"} "$@"
