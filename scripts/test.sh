#!/usr/bin/env bash
# Sets up and runs all checks: style, types, tests. Arguments go to pytest; types are left out then.
#
# STAGELINE_TEST_WORKERS   processes that run tests, a file at a time (default: 3)
# STAGELINE_TESTS=all      every combination of parameters (twice the time), not each value in some
STAGELINE_PURPOSES=dev source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

"$PYTHON" -m ruff check "$ROOT" --config "$ROOT/pyproject.toml"
"$PYTHON" -m ruff format --check --quiet "$ROOT" --config "$ROOT/pyproject.toml"
unset PYTHONDONTWRITEBYTECODE # some tests start Python, again and again
# many ranks of small models: on the CPU, wherever they run; tests/gpu as an argument runs on GPUs
case "$*" in *tests/gpu*) ;; *) export CUDA_VISIBLE_DEVICES="" ;; esac
run_tests() { # long files first: tests of faults, which mostly wait, and of ranks
    "$PYTHON" -m pytest --rootdir "$ROOT" -c "$ROOT/pyproject.toml" \
        --numprocesses "${STAGELINE_TEST_WORKERS:-3}" \
        --dist loadfile --no-loadscope-reorder "$@"
}
# on a real card where torch finds one, else on emulated ones (docs/gpu.md); workers read no -p early
run_gpu_tests() {
    PYTHONPATH="$ROOT" PYTEST_PLUGINS=tests.helpers.emulated_gpu.plugin run_tests "$@"
}
if [ $# -gt 0 ]; then
    case "$*" in *tests/gpu*) run_gpu_tests "$@" ;; *) run_tests "$@" ;; esac
    exit
fi
(cd "$ROOT" && "$PYTHON" -m mypy)
run_tests "$ROOT/tests" --ignore "$ROOT/tests/gpu"
run_gpu_tests "$ROOT/tests/gpu"
# the same code on a kind that torch itself does not have: as torch_npu is one
EMULATED_KIND=npu run_gpu_tests "$ROOT"/tests/gpu/test_a_{runs,answers}.py
# torch takes the kernels for the best instructions of the CPU. Others add up in another order, and
# show what is close by luck. So the comparisons that are not to the bit, of shares, experts
# and rewards, run again with lesser kernels (93 s of CPU time); none are lesser than DEFAULT.
case "$("$PYTHON" -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')" in
AVX512) LESSER=avx2 ;;
DEFAULT) LESSER="" ;;
*) LESSER=default ;; # AVX2, and what other kinds of CPUs have
esac
if [ -n "$LESSER" ]; then
    echo "[tests] again with ATEN_CPU_CAPABILITY=$LESSER" >&2
    ATEN_CPU_CAPABILITY="$LESSER" run_tests \
        "$ROOT"/tests/distributed/test_{new_rows_ranks,moe,reward_parity}.py \
        "$ROOT/tests/distributed/test_data_parallel.py::test_replicas_equal_one_process"
fi
# torchao lies beside the environment: where it is in it, transformers imports it at every start
TORCHAO="$ROOT/.cache/torchao-0.18.0"
if [ ! -d "$TORCHAO" ]; then
    "$PYTHON" -m pip install -qq --disable-pip-version-check --no-deps --target "$TORCHAO.part" torchao==0.18.0
    mv "$TORCHAO.part" "$TORCHAO"
fi
PYTHONPATH="$TORCHAO" run_tests "$ROOT"/tests/unit/test_{quantised_base,lora_quantised}.py
