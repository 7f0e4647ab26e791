#!/usr/bin/env bash
# Talks with a model folder, a checkpoint or an adapter in the terminal; /exit ends.
#   bash scripts/chat.sh --model-path runs/x/checkpoints/best
#   bash scripts/chat.sh --model-path my_model --adapter-path my_adapter --temperature 0.7
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

BUILDER=auto
PROMPT_FN=chat

exec "$PYTHON" "$ROOT/chat.py" \
    --builder "$BUILDER" \
    --prompt-fn "$PROMPT_FN" \
    "$@"
