#!/usr/bin/env bash
# Answers prompts without gold answers, from one of --text, --prompts and --dataset.
#   bash scripts/infer.sh --model-path my_model --text "What does ls do?" --text "And cat?"
#   bash scripts/infer.sh --model-path runs/x/checkpoints/best --prompts questions.jsonl
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

BUILDER=auto
MODEL=generate
PROMPT=chat
PROMPT_FN=chat     # fill, with --prompt question or instruction: for a model without chat template
IMAGE_TOKEN=auto

OUTPUT_DIR="$ROOT/runs/infer"

exec "$PYTHON" -m stageline infer \
    --builder "$BUILDER" \
    --model "$MODEL" \
    --prompt "$PROMPT" \
    --prompt-fn "$PROMPT_FN" \
    --image-token "$IMAGE_TOKEN" \
    --max-new-tokens 256 \
    --output-dir "$OUTPUT_DIR" \
    "$@"
