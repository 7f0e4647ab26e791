#!/usr/bin/env bash
# Runs what is to be known of this machine's cards, in order of worth, into one report in benchmarks/gpu/.
#   bash scripts/gpu_check.sh                        # all cards, 40 minutes; a second call goes on
#   bash scripts/gpu_check.sh --minutes 20 --gpus 1
#   bash scripts/gpu_check.sh --emulated 2           # without a card: tiny shapes, that every row comes
STAGELINE_PURPOSES=dev source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

exec "$PYTHON" "$ROOT/benchmarks/gpu_check.py" "$@"
