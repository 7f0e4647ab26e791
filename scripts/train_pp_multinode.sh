#!/usr/bin/env bash
# Trains over several machines; start it once on each, with the same options and the same folders:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash scripts/train_pp_multinode.sh    # on 10.0.0.1
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash scripts/train_pp_multinode.sh    # on the other
# One stage per process; the job is that of train_pp.sh. See docs/multi_node.md.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
source "$ROOT/scripts/_nodes.sh"

NUM_STAGES="${NUM_STAGES:-$((NNODES * NPROC_PER_NODE))}"
TRAIN_MODEL=internvl
DATASET=digits
PROMPT=digits
PROMPT_FN=fill
IMAGE_TOKEN=auto
COLLATE_FN=sft
LOSS_FN=sft
SCHEDULE=1f1b

# config and tokenizer of the default job, moved into place at once, since machines may share it
CONFIG_PATH="$ROOT/.cache/digits-model"
if [ ! -f "$CONFIG_PATH/config.json" ]; then
    DRAFT="$CONFIG_PATH.$(hostname).$$"
    "$PYTHON" "$ROOT/scripts/make_digits_model.py" "$DRAFT"
    mv -T "$DRAFT" "$CONFIG_PATH" 2>/dev/null || rm -rf "$DRAFT"
fi

# the same on every machine, on a disk that all share: each stage writes its part of a checkpoint
OUTPUT_DIR="$ROOT/runs/digits-${RUN_ID:-multinode}"

exec "${TORCHRUN[@]}" "$ROOT/train_pp.py" \
    --num-stages "$NUM_STAGES" \
    --schedule "$SCHEDULE" \
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
