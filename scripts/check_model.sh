#!/usr/bin/env bash
# Checks a split on the CPU: stages against the unsplit model, in one process. Takes the options
# of a training command unchanged. Exit code 0: equal, 1: a difference, 2: a wrong option.
#   bash scripts/check_model.sh --import my_parts.py --train-model mine --model-path my_model
#   bash scripts/check_model.sh --train-model llama --config-path 7b --check.layers 4 --num-stages 4
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

NUM_STAGES=2
TRAIN_MODEL=internvl
SCHEDULE=1f1b

# the default model is that of scripts/train_pp.sh
MODEL=()
if [[ " $* " != *" --config-path"* && " $* " != *" --model-path"* && " $* " != *" --config"* ]]; then
    CONFIG_PATH="$ROOT/.cache/digits-model"
    if [ ! -f "$CONFIG_PATH/config.json" ]; then
        "$PYTHON" "$ROOT/scripts/make_digits_model.py" "$CONFIG_PATH"
    fi
    MODEL=(--config-path "$CONFIG_PATH")
fi

exec "$PYTHON" -m stageline check \
    --num-stages "$NUM_STAGES" \
    --schedule "$SCHEDULE" \
    --train-model "$TRAIN_MODEL" \
    ${MODEL[@]+"${MODEL[@]}"} \
    "$@"
