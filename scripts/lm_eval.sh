#!/usr/bin/env bash
# Runs tasks of lm-evaluation-harness through a model folder, a checkpoint or an adapter.
#   bash scripts/lm_eval.sh --model-path my_model --num-stages 2 --tasks arc_easy,hellaswag
#   bash scripts/lm_eval.sh --model-path my_model --tasks my_task --lm-eval.include_path my_tasks --limit 20
STAGELINE_PURPOSES=lm-eval source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

exec "$PYTHON" -m stageline lm-eval "$@"
