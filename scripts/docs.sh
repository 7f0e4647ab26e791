#!/usr/bin/env bash
# Builds the guides of docs/ as a site into site/; a broken link ends the build.
#   bash scripts/docs.sh          # then open site/index.html; searching it needs a server:
#   bash scripts/docs.sh serve    # at http://127.0.0.1:8000, built again whenever a page changes
# mkdocs has its own environment, made on first use, and needs neither torch nor .venv.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${STAGELINE_DOCS_VENV:-$ROOT/.cache/docs-venv}"

if [ ! -x "$VENV/bin/mkdocs" ]; then
    "${STAGELINE_PYTHON:-python3}" -m venv "$VENV"
    # the extra `docs` of pyproject.toml, without the package that it belongs to
    "$VENV/bin/python" - "$ROOT/pyproject.toml" >"$VENV/docs.txt" <<'PY'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")
PY
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check \
        --requirement "$VENV/docs.txt" --constraint "$ROOT/requirements.lock"
fi
if [ $# -eq 0 ]; then
    set -- build --strict
fi
COMMAND="$1"
shift
exec "$VENV/bin/mkdocs" "$COMMAND" --config-file "$ROOT/mkdocs.yml" "$@"
