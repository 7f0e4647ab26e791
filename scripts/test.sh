#!/usr/bin/env bash
# Sets up and runs the checks: style, prose, types, tests. With arguments, which go to pytest, only style.
#   bash scripts/test.sh                  # without the tests of tests/slow.txt
#   bash scripts/test.sh --all            # with them, for an NPU, and with lesser kernels
#   bash scripts/test.sh tests/unit -k lora
#
# STAGELINE_TEST_WORKERS   processes that run tests, one file at a time each (default: 3)
unset PYTHONDONTWRITEBYTECODE # some tests start Python many times
STAGELINE_PURPOSES=dev source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

"$PYTHON" -m ruff check "$ROOT" --config "$ROOT/pyproject.toml"
"$PYTHON" -m ruff format --check --quiet "$ROOT" --config "$ROOT/pyproject.toml"
# many ranks of small models run on the CPU on every machine; tests/gpu as an argument runs on GPUs
case "$*" in *tests/gpu*) ;; *) export CUDA_VISIBLE_DEVICES="" ;; esac
run_tests() {
    "$PYTHON" -m pytest --rootdir "$ROOT" -c "$ROOT/pyproject.toml" "$@"
}
shared_out() { # long files start first: tests of faults, which mostly wait, and of ranks
    run_tests --numprocesses "${STAGELINE_TEST_WORKERS:-3}" \
        --dist loadfile --no-loadscope-reorder --maxfail 20 --max-worker-restart 0 "$@"
}
# on a real card where torch finds one, else on emulated ones (docs/gpu.md); workers read no -p early
with_cards() { PYTHONPATH="$ROOT" PYTEST_PLUGINS=tests.helpers.emulated_gpu.plugin "$@"; }

SLOW=(-m "not slow") WIDER=()
if [ "$*" = --all ]; then
    SLOW=() WIDER=(run_on_npus run_with_lesser_kernels)
    shift
fi

if [ $# -gt 0 ]; then
    case "$*" in *tests/gpu*) with_cards shared_out "$@" ;; *) shared_out "$@" ;; esac
    exit
fi

check_prose() { "$PYTHON" "$ROOT/tools/prose.py" --check; }
check_types() { (cd "$ROOT" && "$PYTHON" -m mypy); }
run_on_cards() { with_cards run_tests ${SLOW[@]+"${SLOW[@]}"} "$ROOT/tests/gpu"; }
# the same code on a kind of device outside torch itself, such as that of torch_npu
run_on_npus() { EMULATED_KIND=npu with_cards run_tests "$ROOT"/tests/gpu/test_a_{runs,answers}.py; }
# torch selects kernels for the best instructions of the CPU. Other kernels add up in another order,
# and reveal results that are close by luck. So the comparisons within a tolerance, of shares and
# experts, run again with lesser kernels (50 s of CPU time). DEFAULT is the least.
run_with_lesser_kernels() {
    local lesser
    case "$("$PYTHON" -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')" in
    AVX512) lesser=avx2 ;;
    DEFAULT) return ;;
    *) lesser=default ;; # AVX2, and the kernels of other kinds of CPUs
    esac
    echo "[tests] again with ATEN_CPU_CAPABILITY=$lesser"
    ATEN_CPU_CAPABILITY="$lesser" run_tests \
        "$ROOT"/tests/distributed/test_moe.py \
        "$ROOT/tests/distributed/test_data_parallel.py::test_replicas_equal_one_process"
}

# Run the oldest transformers that README promises, and the newest, with the installed torch.
run_other_transformers() {
    local version code=0
    for version in 5.17.0 5.24.0; do
        STAGELINE_TEST_WORKERS=0 bash "$ROOT/scripts/test_versions.sh" --quick "transformers==$version" || code=1
    done
    return "$code"
}

# These checks run next to the tests, one after the other, each in one process: a worker takes
# seven seconds for its imports. Their output comes last.
beside() {
    local check failed=""
    for check in check_prose check_types run_on_cards run_other_transformers ${WIDER[@]+"${WIDER[@]}"}; do
        echo "[tests] $check"
        "$check" || failed="$failed $check"
    done
    [ -z "$failed" ] || { echo "[tests] failed:$failed" && return 1; }
}
TOLD="$(mktemp)"
set -m # a process group of its own, which ends with this script
beside >"$TOLD" 2>&1 &
BESIDE=$!
set +m
trap 'kill -- "-$BESIDE" 2>/dev/null || true; rm -f "$TOLD"' EXIT
trap 'exit 130' INT
code=0
shared_out ${SLOW[@]+"${SLOW[@]}"} "$ROOT/tests" --ignore "$ROOT/tests/gpu" || code=$?
wait "$BESIDE" || beside_code=$?
cat "$TOLD"
[ "$code" = 0 ] || echo "[tests] failed: shared_out, whose summary is above all that ran beside it"
exit "$((code | ${beside_code:-0}))"
