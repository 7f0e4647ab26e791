#!/usr/bin/env bash
# Reinforcement learning with the stages that train: the small InternVL of train_pp.sh learns to read
# digits for 60 steps, until half of its answers are right, and then trains on its own answers: a
# reward scores the digit. Held-out accuracy is `reward` of the evaluations; docs/grpo.md.
# Pictures are read in tiles here: this trains more slowly, and leaves room for the rewards.
# Change a key below, or append options: bash scripts/train_grpo_digits.sh --rollouts.kl_beta 0.02
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

NUM_STAGES=2
LOSS_FN=grpo
COLLATE_FN=grpo
REWARD=exact_answer
OUTPUT_DIR="$ROOT/runs/grpo-digits-$(date +%Y%m%d-%H%M%S)"
SFT_DIR="$OUTPUT_DIR/sft"

DEVICE="$(stageline_device "$NUM_STAGES")"
bash "$ROOT/scripts/train_pp.sh" --num-stages "$NUM_STAGES" --total-steps 60 --eval-samples 0 \
    --images.max_tiles 12 --output-dir "$SFT_DIR"

exec "$PYTHON" "$ROOT/train_pp.py" \
    --num-stages "$NUM_STAGES" \
    --device "$DEVICE" \
    --partition parameters \
    --train-model internvl \
    --model-path "$SFT_DIR/checkpoints/step-00000060" \
    --dataset digits \
    --prompt digits \
    --prompt-fn fill \
    --image-token auto \
    --collate-fn "$COLLATE_FN" \
    --loss-fn "$LOSS_FN" \
    --reward "$REWARD" \
    --rollouts.group_size 8 \
    --batch-size 128 \
    --micro-batch-size 32 \
    --rollouts.prompts_together 16 \
    --rollouts.max_completion_length 4 \
    --max-token-num 64 \
    --learning-rate 2e-4 \
    --lr-scheduler constant \
    --weight-decay 0 \
    --total-steps 100 \
    --eval-steps 20 \
    --eval-samples 360 \
    --save-steps 50 \
    --output-dir "$OUTPUT_DIR" \
    "$@"
