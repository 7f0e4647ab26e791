# Sourced after _env.sh by the studies with drawn scenes: random weights, training, evaluation, report.
#
# STUDY_DIR   the folder of the runs, ARM/seed-N
# SIZE        of the model: small or large
# SCENES      options of --dataset scenes, for training and evaluation

SPLIT="${SPLIT:-test}" # choose settings on validation
NUM_TEST="${NUM_TEST:-1200}"

scenes_model() { # folder, seed: random weights; the folder is complete or absent
    if [ ! -d "$1" ]; then
        rm -rf "$1.tmp"
        "$PYTHON" "$ROOT/examples/spatial/make_scenes_model.py" "$1.tmp" "$SIZE" "$2"
        mv "$1.tmp" "$1"
    fi
}

scenes_train() { # run folder, weights to start from, seed, options
    "$PYTHON" "$ROOT/train_pp.py" \
        --num-stages 2 \
        --import examples.spatial.parts \
        --train-model internvl \
        --model-path "$2" \
        --dataset scenes \
        "${SCENES[@]}" \
        --prompt vqa \
        --prompt-fn fill \
        --image-token auto \
        --max-token-num 128 \
        --keep-last 1 \
        --resume auto \
        --seed "$3" \
        --output-dir "$1" \
        "${@:4}"
}

scenes_evaluate() { # run folder: answers to held-out scenes, by the newest checkpoint
    "$PYTHON" "$ROOT/evaluate.py" \
        --import examples.spatial.parts \
        --builder auto \
        --model generate \
        --model-path "$(ls -d "$1"/checkpoints/step-* | sort | tail -n 1)" \
        --dataset scenes \
        --dataset.split "$SPLIT" \
        --dataset.num_test "$NUM_TEST" \
        "${SCENES[@]}" \
        --prompt vqa \
        --prompt-fn fill \
        --image-token auto \
        --metric rotate_qa \
        --batch-size 100 \
        --max-new-tokens 4 \
        --output-dir "$1/evaluation"
}

scenes_is_evaluated() { # run folder
    [ -f "$1/evaluation/report.json" ]
}

scenes_report() {
    "$PYTHON" "$ROOT/examples/spatial/study_spatial_report.py" "$STUDY_DIR"
}
