#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct with LoRA by the streaming engine: one process, weights in host
# memory, a few layers at a time on the device. The losses are those of train_smollm2_lora.sh with
# as many steps. Some minutes on 2 cores; takes every GPU of the machine where there are any.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

ENGINE=streaming
TRAIN_MODEL=llama
DATASET=jsonl
PROMPT=chat
PROMPT_FN=chat
LORA_RANK=16
# decoder layers on the device together; the fewer, the less memory and the more recomputation
LAYERS_AT_ONCE=10

MODEL_PATH="$ROOT/.cache/smollm2"
"$PYTHON" "$ROOT/scripts/prepare_smollm2.py" "$MODEL_PATH"

RUN_DIR="${RUN_DIR:-$ROOT/runs/streaming-$(date +%Y%m%d-%H%M%S)}"

"$PYTHON" "$ROOT/train_pp.py" \
    --engine "$ENGINE" \
    --streaming.stages "$LAYERS_AT_ONCE" \
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
    --total-steps 8 \
    --eval-samples 16 \
    --output-dir "$RUN_DIR" \
    "$@"

CHECKPOINT="$(ls -d "$RUN_DIR"/checkpoints/step-* 2>/dev/null | sort | tail -n 1)" || true
if [ -n "$CHECKPOINT" ]; then
    "$PYTHON" "$ROOT/export.py" --model-path "$CHECKPOINT" --output-path "$RUN_DIR/adapter"
fi
