#!/usr/bin/env bash
# Does a small InternVL learn left and right better from answers or from rewards? It is trained on
# drawn scenes, each with its mirror image, from one start in three ways: `sft` on the answers; `grpo`
# with a reward for a right answer, and one for right answers to both images; `both` is `grpo` after
# the first half of `sft`. All see the same scenes in the same order; docs/grpo.md.
# Stop it at any time: it continues when it is started again. Change a value below, or append options
# of the GRPO runs: bash examples/spatial/train_grpo_scenes.sh --loss-fn.entropy_coef 0
NUM_TEST="${NUM_TEST:-600}" # scenes, with their mirror images
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/_env.sh"
source "$ROOT/examples/spatial/_scenes.sh"

SEEDS="${SEEDS:-0 1 2}"
SIZE=small
START_STEPS="${START_STEPS:-200}" # from random weights, which learn nothing from rewards only
STEPS="${STEPS:-60}"
ROWS=32 # rows of a step: 16 scenes and their mirror images
GROUP_SIZE=8
REWARD=exact_answer,spatial_consistency
SCENES=(--dataset.num_things 1 --dataset.references car --dataset.image_size 48
    --dataset.mirrored true --dataset.tasks '[direction,statement]')
STUDY_DIR="${STUDY_DIR:-$ROOT/runs/grpo_scenes}"
DEVICE="$(stageline_device 2)"
COMMON=(--device "$DEVICE" --partition 1,2 --dataset.num_train 10000 --lr-scheduler constant
    --weight-decay 0 --save-steps $((STEPS / 2)) --keep-last 2)

learn() { # run folder, weights to start from, seed, options: the answers of the rows
    scenes_train "${@:1:3}" "${COMMON[@]}" --collate-fn sft --loss-fn sft --eval-samples 0 "${@:4}"
}

earn() { # run folder, weights to start from, seed, options: rewards for its own answers
    scenes_train "${@:1:3}" "${COMMON[@]}" \
        --collate-fn grpo \
        --loss-fn grpo \
        --reward "$REWARD" \
        --rollouts.group_size "$GROUP_SIZE" \
        --rollouts.prompts_together "$ROWS" \
        --rollouts.max_completion_length 3 \
        --loss-fn.entropy_coef 0.01 \
        --batch-size $((ROWS * GROUP_SIZE)) \
        --micro-batch-size 128 \
        --learning-rate 2e-4 \
        --dataset.num_test 200 \
        --eval-steps 10 \
        --eval-samples all \
        "${@:4}"
}

step() { # run folder, number
    printf '%s/checkpoints/step-%08d' "$1" "$2"
}

for seed in $SEEDS; do
    start="$STUDY_DIR/start/seed-$seed" sft="$STUDY_DIR/sft/seed-$seed" half=$((STEPS / 2))
    for arm in start sft grpo both; do
        run="$STUDY_DIR/$arm/seed-$seed"
        if scenes_is_evaluated "$run"; then continue; fi
        echo "== $arm, seed $seed"
        case "$arm" in
            start) # which way the car faces has to be seen before what is left of it
                scenes_model "$STUDY_DIR/random/seed-$seed" "$seed"
                learn "$run" "$STUDY_DIR/random/seed-$seed" "$seed" --total-steps "$START_STEPS" \
                    --dataset.mirrored false --dataset.tasks '[direction,statement,picture,facing]' \
                    --batch-size 64 --micro-batch-size 32 --learning-rate 1e-3 --warmup-steps 20
                ;;
            sft)
                learn "$run" "$(step "$start" "$START_STEPS")" "$seed" --total-steps "$STEPS" \
                    --batch-size "$ROWS" --micro-batch-size 16 --learning-rate 5e-4
                ;;
            grpo) earn "$run" "$(step "$start" "$START_STEPS")" "$seed" --total-steps "$STEPS" "$@" ;;
            both) earn "$run" "$(step "$sft" "$half")" "$seed" --total-steps "$half" "$@" ;;
        esac
        scenes_evaluate "$run"
    done
done
scenes_report
