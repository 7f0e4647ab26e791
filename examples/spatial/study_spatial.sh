#!/usr/bin/env bash
# Does a contrastive loss help a small VLM to tell left from right? Scenes drawn on the fly, `sft`
# against `contrastive` over 3 seeds, held-out accuracy with intervals; see docs/study_spatial.md.
# About 12 minutes on 2 CPU cores. Stop it at any time: it continues when it is started again.
# Change a value below, or append options of training: bash examples/spatial/study_spatial.sh --sim-fn cos
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/_env.sh"
source "$ROOT/examples/spatial/_scenes.sh"

SIZE="${SIZE:-small}"
SEEDS="${SEEDS:-0 1 2}"
ARMS="${ARMS:-sft contrastive}"
SIM_FN="${SIM_FN:-js}"
NEGATIVES=2
COMPARED=(--collate-fn.marked directions,clock,yes,no --loss-fn.warmup_steps 100)
OPTIONS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --size) SIZE="$2" && shift 2 ;;
        --seeds) SEEDS="$2" && shift 2 ;;
        --arms) ARMS="$2" && shift 2 ;;
        --sim-fn) SIM_FN="$2" && shift 2 ;;
        --loss-fn.* | --collate-fn.*) COMPARED+=("$1" "$2") && shift 2 ;; # sft has none of them
        *) OPTIONS+=("$1") && shift ;;
    esac
done

case "$SIZE" in
    small) # 2 CPU cores
        SCENES=(--dataset.num_things 1 --dataset.references car --dataset.image_size 48)
        # the vision layers are on stage 0: fewer text layers there make equal stages
        TRAIN=(--batch-size 64 --micro-batch-size 32 --learning-rate 1e-3 --total-steps 500
            --dataset.num_train 10000 --partition 1,2)
        ;;
    large) # a GPU with 24 GB or more for each stage
        SCENES=(--dataset.num_things 3 --dataset.image_size 96 --dataset.headings 12
            --dataset.oblique 0.3)
        TRAIN=(--batch-size 256 --micro-batch-size 64 --learning-rate 5e-4 --total-steps 20000
            --dataset.num_train 200000 --bf16)
        ;;
    *) stageline_fail "--size $SIZE: choose small or large." ;;
esac
STUDY_DIR="${STUDY_DIR:-$ROOT/runs/study_spatial/$SIZE}"

train() { # arm, seed: both arms see the same pictures in the same order, from the same start
    local compared=()
    [ "$1" = sft ] || compared=(--sim-fn "$SIM_FN" "${COMPARED[@]}")
    scenes_train "$STUDY_DIR/$1/seed-$2" "$STUDY_DIR/start/seed-$2" "$2" \
        --dataset.negatives "$NEGATIVES" \
        --collate-fn "$1" \
        --loss-fn "$1" \
        ${compared[@]+"${compared[@]}"} \
        --rows.order given \
        "${TRAIN[@]}" \
        --min-lr 1e-4 \
        --warmup-steps 20 \
        --weight-decay 0.05 \
        --eval-samples 0 \
        --save-steps 250 \
        ${OPTIONS[@]+"${OPTIONS[@]}"}
}

for seed in $SEEDS; do
    for arm in $ARMS; do
        if ! scenes_is_evaluated "$STUDY_DIR/$arm/seed-$seed"; then
            echo "== $arm, seed $seed"
            scenes_model "$STUDY_DIR/start/seed-$seed" "$seed"
            train "$arm" "$seed"
            scenes_evaluate "$STUDY_DIR/$arm/seed-$seed"
        fi
    done
done
scenes_report
