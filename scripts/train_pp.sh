#!/usr/bin/env bash
# Trains on several stages. Default job: a small InternVL, random start, learns to read the 1,437
# handwritten digits of scikit-learn on 2 stages; on GPUs if there is one for each, else on the CPU.
# Change a key below, or append options: bash scripts/train_pp.sh --num-stages 4 --total-steps 800
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

NUM_STAGES=2
DEVICE="$(stageline_device "$NUM_STAGES")"
TRAIN_MODEL=internvl
DATASET=digits
PROMPT=digits
PROMPT_FN=fill
IMAGE_TOKEN=auto
COLLATE_FN=sft
LOSS_FN=sft
SCHEDULE=1f1b
PARTITION=parameters # equal weights on each stage; with equal numbers of layers the others wait for the tower

# config and tokenizer of the default job, made from the task's own text
CONFIG_PATH="$ROOT/.cache/digits-model"
if [ ! -f "$CONFIG_PATH/config.json" ]; then
    "$PYTHON" "$ROOT/scripts/make_digits_model.py" "$CONFIG_PATH"
fi

OUTPUT_DIR="$ROOT/runs/digits-$(date +%Y%m%d-%H%M%S)"

exec "$PYTHON" "$ROOT/train_pp.py" \
    --num-stages "$NUM_STAGES" \
    --device "$DEVICE" \
    --schedule "$SCHEDULE" \
    --partition "$PARTITION" \
    --train-model "$TRAIN_MODEL" \
    --config-path "$CONFIG_PATH" \
    --dataset "$DATASET" \
    --prompt "$PROMPT" \
    --prompt-fn "$PROMPT_FN" \
    --image-token "$IMAGE_TOKEN" \
    --collate-fn "$COLLATE_FN" \
    --loss-fn "$LOSS_FN" \
    --batch-size 64 \
    --micro-batch-size 16 \
    --max-token-num 64 \
    --num-workers 1 \
    --learning-rate 2e-3 \
    --min-lr 1e-4 \
    --warmup-steps 20 \
    --weight-decay 0.05 \
    --total-steps 300 \
    --eval-steps 50 \
    --eval-samples 360 \
    --output-dir "$OUTPUT_DIR" \
    "$@"
