#!/usr/bin/env bash
# What test.sh checks, and the types of the engine.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

"$PYTHON" -m mypy --config-file "$ROOT/pyproject.toml" "$ROOT/stageline" ||
    echo "[check] types: see above" >&2
exec bash "$ROOT/scripts/test.sh" "$@"
