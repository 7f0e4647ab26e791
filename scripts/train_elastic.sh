#!/usr/bin/env bash
# Restarts a run from its newest checkpoint after a lost rank or card, at most MAX_RESTARTS times, on
# the remaining cards with one stage on each. Takes a recipe of one pipeline and its options:
#   NUM_STAGES=4 bash scripts/train_elastic.sh scripts/train_pp.sh --save-steps 50
#
# NUM_STAGES     stages, and cards, of the first start               (default: 2)
# MAX_RESTARTS   starts after a failure                              (default: 10)
# OUTPUT_DIR     folder of the run; the same one again continues it  (default: runs/elastic-DATE)
# PROBE          Python that fails on a card that does not compute   (default: a small sum)
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
[ -f "${1:-}" ] || stageline_fail "${1:-nothing} is not a recipe. Give its path first: bash $0 scripts/train_pp.sh"
NUM_STAGES="${NUM_STAGES:-2}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/runs/elastic-$(date +%Y%m%d-%H%M%S)}"
PROBE="${PROBE:-import torch; x = torch.ones(64, device='cuda'); assert float(x @ x) == 64.0}"

# Print the working cards as CUDA_VISIBLE_DEVICES lists them; a lost card may hang its driver.
cards() {
    local all card
    all="${CARDS:-$(nvidia-smi --list-gpus 2>/dev/null | awk '{ print NR - 1 }')}"
    for card in ${all//,/ }; do
        CUDA_VISIBLE_DEVICES="$card" timeout -k 1 90 "$PYTHON" -c "$PROBE" >/dev/null 2>&1 || continue
        echo "$card"
    done | head -n "$NUM_STAGES" | paste -sd , -
}

CARDS="${CUDA_VISIBLE_DEVICES:-}"
stages="$NUM_STAGES"
for ((restart = 0; ; restart++)); do
    bash "$@" --num-stages "$stages" --output-dir "$OUTPUT_DIR" --resume auto &
    trap "kill -TERM $! 2>/dev/null" TERM
    trap "kill -INT $! 2>/dev/null" INT
    code=0
    wait $! || code=$?
    while kill -0 $! 2>/dev/null; do code=0 && wait $! || code=$?; done # a signal ends `wait`, not the run
    # 8 = a rank hung, 9 = a rank was lost or crashed; any other failure would recur
    [[ "$code" =~ ^(8|9)$ ]] && [ "$restart" -lt "${MAX_RESTARTS:-10}" ] || exit "$code"
    if nvidia-smi --list-gpus >/dev/null 2>&1; then
        CUDA_VISIBLE_DEVICES="$(cards)"
        export CUDA_VISIBLE_DEVICES
        stages="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)" || stageline_fail "no card computes any more"
    fi
    echo "elastic: restart $((restart + 1)) of ${MAX_RESTARTS:-10}, $stages of $NUM_STAGES stages," \
        "cards ${CUDA_VISIBLE_DEVICES:-none}" >&2
done
