#!/usr/bin/env bash
# Sets up and runs all checks: style, types of words, tests. Arguments go to pytest.
#
# STAGELINE_TEST_WORKERS   processes that run tests, a file at a time (default: 2)
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

"$PYTHON" -m ruff check "$ROOT" --config "$ROOT/pyproject.toml"
"$PYTHON" -m ruff format --check --quiet "$ROOT" --config "$ROOT/pyproject.toml"
run_tests() {
    "$PYTHON" -m pytest --rootdir "$ROOT" -c "$ROOT/pyproject.toml" \
        --numprocesses "${STAGELINE_TEST_WORKERS:-2}" --dist loadfile "$@"
}
if [ $# -gt 0 ]; then
    run_tests "$@"
    exit
fi
run_tests "$ROOT/tests"
# torchao lies beside the environment: where it is in it, transformers imports it at every start
TORCHAO="$ROOT/.cache/torchao-0.18.0"
if [ ! -d "$TORCHAO" ]; then
    "$PYTHON" -m pip install -qq --disable-pip-version-check --no-deps --target "$TORCHAO.part" torchao==0.18.0
    mv "$TORCHAO.part" "$TORCHAO"
fi
PYTHONPATH="$TORCHAO" run_tests "$ROOT"/tests/unit/test_{quantised_base,lora_quantised}.py
