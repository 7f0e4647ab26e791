#!/usr/bin/env bash
# Adds layers to a model that change nothing until they are trained (LLaMA-Pro):
#   bash scripts/expand_blocks.sh SmolLM2-135M SmolLM2-135M-pro --num-expand 6
# The number divides that of the layers. Holds one file of weights in memory at a time.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

exec "$PYTHON" "$ROOT/scripts/expand_blocks.py" "$@"
