#!/usr/bin/env bash
# Sets up and runs all checks: style, types of words, tests. Arguments go to pytest.
#
# STAGELINE_TEST_WORKERS   processes that run tests, a file at a time (default: 2)
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

"$PYTHON" -m ruff check "$ROOT" --config "$ROOT/pyproject.toml"
"$PYTHON" -m ruff format --check --quiet "$ROOT" --config "$ROOT/pyproject.toml"
exec "$PYTHON" -m pytest --rootdir "$ROOT" -c "$ROOT/pyproject.toml" \
    --numprocesses "${STAGELINE_TEST_WORKERS:-2}" --dist loadfile "${@:-$ROOT/tests}"
