#!/usr/bin/env bash
# Answers over HTTP as OpenAI's API does, with a web page at /; Ctrl-C ends.
#   bash scripts/serve.sh --model-path runs/x/checkpoints/best --num-stages 2
#   bash scripts/serve.sh --model-path my_model --host 0.0.0.0 --http.api_key_file keys.txt
STAGELINE_PURPOSES=serve source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

PROMPT_FN=chat
IMAGE_TOKEN=auto

exec "$PYTHON" "$ROOT/serve.py" \
    --prompt-fn "$PROMPT_FN" \
    --image-token "$IMAGE_TOKEN" \
    "$@"
