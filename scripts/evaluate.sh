#!/usr/bin/env bash
# Evaluates the newest run of train_pp.sh on the held-out digits, by generation.
# Another model: MODEL_PATH=folder bash scripts/evaluate.sh, or append --model-path folder
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

BUILDER=auto
MODEL=generate
DATASET=digits
PROMPT=digits
PROMPT_FN=fill
IMAGE_TOKEN=auto
METRIC=exact_match

newest() { # the last checkpoint of the newest run
    local found
    found="$(ls -d "$ROOT"/runs/digits-*/checkpoints/step-* 2>/dev/null | sort | tail -n 1)" || true
    echo "$found"
}
MODEL_PATH="${MODEL_PATH:-$(newest)}"
if [ -z "$MODEL_PATH" ] && [[ " $* " != *" --model-path"* ]]; then
    echo "error: there is no checkpoint below $ROOT/runs yet. Run scripts/train_pp.sh first, or" \
        "set MODEL_PATH." >&2
    exit 2
fi
OUTPUT_DIR="$(dirname "$(dirname "${MODEL_PATH:-$ROOT/runs/x/x}")")/evaluation"

exec "$PYTHON" "$ROOT/evaluate.py" \
    --builder "$BUILDER" \
    --model "$MODEL" \
    --model-path "$MODEL_PATH" \
    --dataset "$DATASET" \
    --prompt "$PROMPT" \
    --prompt-fn "$PROMPT_FN" \
    --image-token "$IMAGE_TOKEN" \
    --metric "$METRIC" \
    --batch-size 60 \
    --max-new-tokens 4 \
    --output-dir "$OUTPUT_DIR" \
    "$@"
