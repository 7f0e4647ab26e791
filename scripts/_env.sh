# Sourced by every script: makes .venv on first use, and sets ROOT and PYTHON. Changes no directory.
#
# STAGELINE_PYTHON        the python that makes .venv             (default: python3)
# STAGELINE_TORCH         the torch to install                    (default: torch==2.13.0)
# STAGELINE_TORCH_INDEX   a package index that has this build     (default: pip's own)
# STAGELINE_VENV          where the environment lies              (default: ROOT/.venv)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${STAGELINE_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

stageline_say() { echo "[setup] $*" >&2; }

stageline_fail() {
    echo "error: $*" >&2
    exit 2
}

# What the environment is made from; another content means it is made again.
stageline_fingerprint() {
    cat "$ROOT/requirements.lock" "$ROOT/scripts/_env.sh" | cksum
    echo "${STAGELINE_TORCH:-} ${STAGELINE_PYTHON:-}"
}

# A python that has a GPU build of torch already: that one is used, not downloaded again.
stageline_has_gpu_torch() {
    "$1" - >/dev/null 2>&1 <<'PY'
import torch

version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
assert torch.cuda.is_available() and version >= (2, 11)
PY
}

stageline_install_torch() {
    local torch="${STAGELINE_TORCH:-torch==2.13.0}"
    local index=()
    [ -n "${STAGELINE_TORCH_INDEX:-}" ] && index=(--index-url "$STAGELINE_TORCH_INDEX")
    if ! command -v nvidia-smi >/dev/null 2>&1 && [ -z "${STAGELINE_TORCH:-}" ]; then
        stageline_say "no GPU here: installing the CPU build of $torch"
        "$PYTHON" -m pip install -qq --disable-pip-version-check ${index[@]+"${index[@]}"} "$torch+cpu" 2>/dev/null && return
        stageline_say "pip finds no CPU build (set STAGELINE_TORCH_INDEX to an index that has it);"
        stageline_say "taking the default build, which is several GB"
    fi
    stageline_say "installing $torch"
    "$PYTHON" -m pip install -qq --disable-pip-version-check ${index[@]+"${index[@]}"} "$torch"
}

stageline_make_venv() {
    local base="${STAGELINE_PYTHON:-python3}"
    command -v "$base" >/dev/null 2>&1 || stageline_fail "$base was not found. Python 3.11 or newer" \
        "was expected, because everything runs in it: install it or set STAGELINE_PYTHON."
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || stageline_fail "$base is" \
        "$("$base" --version 2>&1). Python 3.11 or newer was expected: install it or set" \
        "STAGELINE_PYTHON."
    stageline_say "first use: making $VENV (a few minutes; the second time takes none)"
    rm -rf "$VENV"
    if stageline_has_gpu_torch "$base"; then
        stageline_say "using the torch that $base has"
        "$base" -m venv --system-site-packages "$VENV"
    else
        "$base" -m venv "$VENV"
        stageline_install_torch
    fi
    stageline_say "installing the packages of requirements.lock"
    "$PYTHON" -m pip install -qq --disable-pip-version-check --requirement "$ROOT/requirements.lock"
    "$PYTHON" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable "$ROOT"
    stageline_fingerprint >"$VENV/.stageline-ready" # last: a killed set-up is done again
    stageline_say "done"
}

stageline_is_ready() {
    [ -f "$VENV/.stageline-ready" ] &&
        [ "$(cat "$VENV/.stageline-ready")" = "$(stageline_fingerprint)" ]
}

if ! stageline_is_ready; then
    mkdir -p "$(dirname "$VENV")"
    exec 9>"$VENV.lock" # two scripts at once: the second waits
    if command -v flock >/dev/null 2>&1; then flock 9; fi
    stageline_is_ready || stageline_make_venv
    exec 9>&-
fi
