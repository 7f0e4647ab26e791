#!/usr/bin/env bash
# Serves a model over HTTP with OpenAI's API and a web page at /; Ctrl-C stops it.
#   bash scripts/serve.sh --model-path runs/x/checkpoints/best --num-stages 2
#   bash scripts/serve.sh --model-path my_model --host 0.0.0.0 --http.api_key_file keys.txt
STAGELINE_PURPOSES=serve source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

PROMPT_FN=chat
IMAGE_TOKEN=auto

exec "$PYTHON" "$ROOT/serve.py" \
    --prompt-fn "$PROMPT_FN" \
    --image-token "$IMAGE_TOKEN" \
    "$@"
