#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct with LoRA on 2 stages: what does a command do? Real weights, the
# questions of data/manpages_instruct.jsonl; then exports the adapter. A few minutes on 2 cores.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

NUM_STAGES=2
DEVICE="$(stageline_device "$NUM_STAGES")"
TRAIN_MODEL=llama
DATASET=jsonl
PROMPT=chat
PROMPT_FN=chat
LORA_RANK=16
# the head costs the last stage the time of about six layers
PARTITION=18,12

MODEL_PATH="$ROOT/.cache/smollm2"
"$PYTHON" "$ROOT/scripts/prepare_smollm2.py" "$MODEL_PATH"

RUN_DIR="${RUN_DIR:-$ROOT/runs/smollm2-lora-$(date +%Y%m%d-%H%M%S)}"

"$PYTHON" "$ROOT/train_pp.py" \
    --num-stages "$NUM_STAGES" \
    --device "$DEVICE" \
    --partition "$PARTITION" \
    --train-model "$TRAIN_MODEL" \
    --model-path "$MODEL_PATH" \
    --dataset "$DATASET" \
    --dataset-path "$ROOT/data/manpages_instruct.jsonl" \
    --prompt "$PROMPT" \
    --prompt-fn "$PROMPT_FN" \
    --image-token none \
    --collate-fn sft \
    --llm-lora-num 1 \
    --lora.rank "$LORA_RANK" \
    --lora.alpha 32 \
    --parts.lm_head.frozen \
    --batch-size 16 \
    --micro-batch-size 2 \
    --max-token-num 160 \
    --learning-rate 1e-3 \
    --min-lr 1e-4 \
    --warmup-steps 5 \
    --total-steps 40 \
    --eval-steps 20 \
    --eval-samples 48 \
    --output-dir "$RUN_DIR" \
    "$@"

CHECKPOINT="$(ls -d "$RUN_DIR"/checkpoints/step-* 2>/dev/null | sort | tail -n 1)" || true
if [ -n "$CHECKPOINT" ]; then
    "$PYTHON" "$ROOT/export.py" --model-path "$CHECKPOINT" --output-path "$RUN_DIR/adapter"
    "$PYTHON" "$ROOT/export.py" --model-path "$CHECKPOINT" --output-path "$RUN_DIR/merged" --merge
fi
