#!/usr/bin/env bash
# Runs all GPU checks of this machine, the most important first, into one report in benchmarks/gpu/.
#   bash scripts/gpu_check.sh                        # all cards, 40 minutes; a second call continues
#   bash scripts/gpu_check.sh --minutes 20 --gpus 1
#   bash scripts/gpu_check.sh --emulated 2           # without a card: tiny shapes, every row is written
#   bash scripts/gpu_check.sh --here --seconds 525 --out FOLDER   # python3 (or STAGELINE_PYTHON) as it is
case " $* " in
*" --here "*) # no setup, no network: the caller has installed all packages
    ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    PYTHON="${STAGELINE_PYTHON:-python3}"
    export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
    ;;
*) STAGELINE_PURPOSES=dev source "$(dirname "${BASH_SOURCE[0]}")/_env.sh" ;;
esac

exec "$PYTHON" "$ROOT/benchmarks/gpu_check.py" "$@"
