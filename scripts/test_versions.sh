#!/usr/bin/env bash
# Runs the suites that depend on torch and transformers under other versions of the two.
#   bash scripts/test_versions.sh torch==2.11.0 transformers==5.17.0
#   STAGELINE_PYTHON=python3.12 bash scripts/test_versions.sh torch==2.15.0 transformers==5.24.0
#   bash scripts/test_versions.sh --quick transformers==5.24.0   # one to two minutes
#
# A version that is not given is that of .venv. The environment is .venv-PYTHON-TORCH-TRANSFORMERS, next
# to .venv; it is made on first use (torch is several GB) and kept. A whole run that ends enters its
# row in benchmarks/versions.md. Other arguments go to pytest in the place of the suites.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
env -u STAGELINE_PYTHON -u STAGELINE_TORCH STAGELINE_PURPOSES=dev bash "$ROOT/scripts/_env.sh"

# the suites, by subject
declare -A SUITES=(
    [splits]="unit/test_proof.py unit/test_shrink.py unit/test_model_cutter.py unit/test_step.py unit/test_torch_names.py shelf/test_families.py scripts/test_stage_names.py"
    [recompute]="unit/test_checkpointing.py unit/test_layer_seeds.py distributed/test_training_options.py"
    [lora]="unit/test_lora.py unit/test_lora_kinds.py unit/test_adapter.py unit/test_adapter_start.py distributed/test_lora_kinds_ranks.py"
    [decoding]="unit/test_answers_proof.py unit/test_decoding_cache.py unit/test_decoding_families.py unit/test_decoding_pieces.py unit/test_decoding_mllama.py unit/test_device_map.py unit/test_generate.py unit/test_generate_vision.py distributed/test_decoding.py"
    [packing]="unit/test_packing.py unit/test_packing_check.py distributed/test_packing_attention.py"
    [streaming]="unit/test_streaming_*.py distributed/test_streaming_run.py"
    [checkpoints]="unit/test_save.py unit/test_load.py unit/test_shards.py unit/test_plain_folder.py unit/test_export.py unit/test_export_families.py unit/test_resize_vocab.py distributed/test_save_ranks.py distributed/test_process_group.py"
    [vision]="distributed/test_vision_stages.py unit/test_example_batch.py unit/test_neftune.py"
    [parity]="distributed/test_parity.py distributed/test_vision_parity.py distributed/test_moe.py distributed/test_schedule_parity.py distributed/test_reward_parity.py distributed/test_runner.py"
)
# the smallest suite that shows whether another transformers splits, decodes, trains and saves
QUICK="unit/test_torch_names.py unit/test_decoding_families.py unit/test_answers_proof.py unit/test_proof.py unit/test_plain_folder.py unit/test_neftune.py"

TORCH="" TRANSFORMERS="" IS_QUICK="" ARGUMENTS=()
for word in "$@"; do
    case "$word" in
    torch==*) TORCH="$word" ;;
    transformers==*) TRANSFORMERS="$word" ;;
    --quick) IS_QUICK=1 ;;
    *) ARGUMENTS+=("$word") ;;
    esac
done
LOCKED="$ROOT/.venv/bin/python"
locked() { "$LOCKED" -c "import importlib.metadata as m; print('$1==' + m.version('$1').split('+')[0])"; }
export STAGELINE_TORCH="${TORCH:-$(locked torch)}" STAGELINE_TRANSFORMERS="${TRANSFORMERS:-$(locked transformers)}"
# the locked torch is that of .venv, which is not downloaded again
[ "$STAGELINE_TORCH" != "$(locked torch)" ] || export STAGELINE_PYTHON="${STAGELINE_PYTHON:-$LOCKED}"
name="$("${STAGELINE_PYTHON:-python3}" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
name="$name-$STAGELINE_TORCH-$STAGELINE_TRANSFORMERS"
export STAGELINE_VENV="$ROOT/.venv-${name//==/}"
STAGELINE_PURPOSES=dev source "$ROOT/scripts/_env.sh"

export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
run_tests() { # FILE...: a file at a time
    "$PYTHON" -m pytest --rootdir "$ROOT" -c "$ROOT/pyproject.toml" --dist loadfile --no-loadscope-reorder \
        --numprocesses "${STAGELINE_TEST_WORKERS:-2}" --max-worker-restart 0 "$@"
}
cd "$ROOT/tests"
if [ -n "$IS_QUICK" ]; then
    run_tests $QUICK
elif [ ${#ARGUMENTS[@]} -gt 0 ]; then
    cd "$ROOT" && run_tests "${ARGUMENTS[@]}"
else
    report="$STAGELINE_VENV/report.xml" code=0
    run_tests --junit-xml "$report" ${SUITES[@]} || code=$?
    [ "$code" -gt 1 ] || "$PYTHON" "$ROOT/benchmarks/versions.py" "$report"
    exit "$code"
fi
