#!/usr/bin/env bash
# Left and right by answers or by rewards? A small InternVL sees drawn scenes, each with its mirror
# image, and goes on from one start in three ways: `sft` learns the answers; `grpo` answers, and is
# rewarded where it is right, and again where both images are; `both` is `grpo` after the first half
# of `sft`. The same scenes in the same order, held-out accuracy over three seeds; docs/grpo.md.
# Stop it at any time: started again it goes on where it was. Change a key below, or append options
# of the rewarded runs: bash scripts/train_grpo_scenes.sh --loss-fn.entropy_coef 0
NUM_TEST="${NUM_TEST:-600}" # scenes, with their mirror images
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
source "$ROOT/scripts/_scenes.sh"

SEEDS="${SEEDS:-0 1 2}"
SIZE=small
NUM_STAGES=2
START_STEPS=200 # on random weights: rewards alone would teach them nothing
STEPS=100
ROWS=32 # a step: 16 scenes and their mirror images
GROUP_SIZE=8
LEARNING_RATE=5e-4
REWARD=exact_answer,spatial_consistency
LOOK=(--dataset.num_things 1 --dataset.references car --dataset.image_size 48)
SCENES=("${LOOK[@]}" --dataset.mirrored true --dataset.tasks '["direction"]')
STUDY_DIR="${STUDY_DIR:-$ROOT/runs/grpo_scenes}"
DEVICE="$(stageline_device "$NUM_STAGES")"

train() { # folder, start, steps, seed, options
    "$PYTHON" "$ROOT/train_pp.py" \
        --num-stages "$NUM_STAGES" \
        --device "$DEVICE" \
        --partition 1,2 \
        --train-model internvl \
        --model-path "$2" \
        --dataset scenes \
        --dataset.num_train 10000 \
        --prompt vqa \
        --prompt-fn fill \
        --image-token auto \
        --max-token-num 64 \
        --lr-scheduler constant \
        --weight-decay 0 \
        --total-steps "$3" \
        --save-steps $((STEPS / 2)) \
        --keep-last 2 \
        --resume auto \
        --seed "$4" \
        --output-dir "$1" \
        "${@:5}"
}

learn() { # folder, start, steps, seed, options: the answers of the rows
    train "$@" --collate-fn sft --loss-fn sft --eval-samples 0
}

earn() { # folder, start, steps, seed, options: rewards for answers of its own
    train "${@:1:4}" \
        --collate-fn grpo \
        --loss-fn grpo \
        --reward "$REWARD" \
        --group-size "$GROUP_SIZE" \
        --prompts-together "$ROWS" \
        --max-completion-length 3 \
        --loss-fn.entropy_coef 0.01 \
        --batch-size $((ROWS * GROUP_SIZE)) \
        --micro-batch-size 64 \
        --learning-rate "$LEARNING_RATE" \
        --eval-steps 10 \
        --eval-samples 400 \
        "${SCENES[@]}" \
        "${@:5}"
}

checkpoint() { # folder, step
    printf '%s/checkpoints/step-%08d' "$1" "$2"
}

for seed in $SEEDS; do
    start="$STUDY_DIR/start/seed-$seed" sft="$STUDY_DIR/sft/seed-$seed"
    answers=("${SCENES[@]}" --batch-size "$ROWS" --micro-batch-size 16
        --learning-rate "$LEARNING_RATE")
    for arm in start sft grpo both; do
        run="$STUDY_DIR/$arm/seed-$seed"
        if scenes_is_evaluated "$run"; then continue; fi
        echo "== $arm, seed $seed"
        case "$arm" in
            start) # which way the car faces has to be seen before directions can
                scenes_model "$STUDY_DIR/random/seed-$seed" "$seed"
                learn "$run" "$STUDY_DIR/random/seed-$seed" "$START_STEPS" "$seed" "${LOOK[@]}" \
                    --dataset.tasks '["direction", "picture", "facing"]' \
                    --batch-size 64 --micro-batch-size 32 --learning-rate 1e-3 --warmup-steps 20
                ;;
            sft) learn "$run" "$(checkpoint "$start" "$START_STEPS")" "$STEPS" "$seed" "${answers[@]}" ;;
            grpo) earn "$run" "$(checkpoint "$start" "$START_STEPS")" "$STEPS" "$seed" "$@" ;;
            both) earn "$run" "$(checkpoint "$sft" $((STEPS / 2)))" $((STEPS / 2)) "$seed" "$@" ;;
        esac
        scenes_evaluate "$run"
    done
done
scenes_report
