#!/usr/bin/env bash
# Talks with a model folder, a checkpoint, an adapter or a server in the terminal; /exit ends.
#   bash scripts/chat.sh --model-path runs/x/checkpoints/best
#   bash scripts/chat.sh --model-path my_model --adapter-path my_adapter --temperature 0.7
#   bash scripts/chat.sh --server http://127.0.0.1:8000 --temperature 0.7
STAGELINE_PURPOSES=remote source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

BUILDER=auto
PROMPT_FN=chat
IMAGE_TOKEN=auto

exec "$PYTHON" -m stageline chat \
    --builder "$BUILDER" \
    --prompt-fn "$PROMPT_FN" \
    --image-token "$IMAGE_TOKEN" \
    "$@"
