#!/usr/bin/env bash
# Pre-trains a small Llama from random weights on 2 stages, on the corpus that build_corpus.sh makes
# of the guides of this repository: three quarters English, one quarter Chinese in each batch.
#   bash scripts/train_corpus.sh                  # some minutes on 2 cores
#   bash scripts/train_corpus.sh --resume auto    # continues after a stop
# With --dp-degree 2 --batch-size 4, or --batch-size 4 --accumulate-steps 2, it continues with the
# same rows.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

NUM_STAGES=2
DEVICE="$(stageline_device "$NUM_STAGES")"
TRAIN_MODEL=llama
BATCH_SIZE=8
GLOBAL_BATCH_DISTRIBUTED=6,2 # rows of each type in a batch of all replicas; adds up to it
DROP_MODE=last_ends_fill     # an epoch ends when every row was drawn; smaller types repeat
MAX_TOKEN_NUM=1024           # not below the --seq-length of the corpus

SAVE_PATH="${SAVE_PATH:-$ROOT/.cache/corpus}"
CORPUS="${CORPUS:-$SAVE_PATH/guides}" # the path of CORPUS.bin and CORPUS.idx without suffix
CONFIG_PATH="${CONFIG_PATH:-$SAVE_PATH/model}"
RUN_DIR="${RUN_DIR:-$ROOT/runs/corpus}"

if [ ! -f "$CORPUS.idx" ]; then
    SAVE_PATH="$SAVE_PATH" bash "$ROOT/scripts/build_corpus.sh"
fi
if [ ! -f "$CONFIG_PATH/config.json" ]; then
    "$PYTHON" "$ROOT/scripts/make_corpus_model.py" "$CONFIG_PATH" "$SAVE_PATH/tokenizer"
fi

exec "$PYTHON" "$ROOT/train_pp.py" \
    --num-stages "$NUM_STAGES" \
    --device "$DEVICE" \
    --train-model "$TRAIN_MODEL" \
    --config-path "$CONFIG_PATH" \
    --dataset corpus \
    --dataset-path "$CORPUS" \
    --dataset.test_size 8 \
    --collate-fn pt \
    --global-batch-distributed "$GLOBAL_BATCH_DISTRIBUTED" \
    --drop-mode "$DROP_MODE" \
    --batch-size "$BATCH_SIZE" \
    --micro-batch-size 2 \
    --max-token-num "$MAX_TOKEN_NUM" \
    --learning-rate 2e-3 \
    --min-lr 2e-4 \
    --warmup-steps 5 \
    --weight-decay 0.1 \
    --total-steps 60 \
    --eval-steps 20 \
    --save-steps 10 \
    --keep-last 2 \
    --output-dir "$RUN_DIR" \
    "$@"
