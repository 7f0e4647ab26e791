# Sourced by every script: makes .venv on first use, and sets ROOT and PYTHON. Changes no directory.
#
# It installs what training needs. A script that needs more says so: STAGELINE_PURPOSES=serve source
# .../_env.sh. A purpose is an extra of pyproject.toml; requirements.lock has the versions of all.
#
# STAGELINE_PYTHON        the python that makes .venv             (default: python3)
# STAGELINE_TORCH         the torch to install                    (default: torch==2.13.0)
# STAGELINE_TORCH_INDEX   a package index that has this build     (default: pip's own)
# STAGELINE_TRANSFORMERS  the transformers to install             (default: that of requirements.lock)
# STAGELINE_VENV          the folder of the environment           (default: ROOT/.venv)

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
    sed '/^\[tool/,$d' "$ROOT/pyproject.toml" | cat "$ROOT/requirements.lock" "$ROOT/scripts/_env.sh" - | cksum
    echo "${STAGELINE_TORCH:-} ${STAGELINE_PYTHON:-} ${STAGELINE_TRANSFORMERS:-}"
}

# Whether a python has a torch that can be used instead of downloading one: that of STAGELINE_TORCH if
# set, built for an accelerator, or any build of the python that STAGELINE_PYTHON names.
stageline_has_torch() {
    "$1" - >/dev/null 2>&1 <<'PY'
import os

import torch

version = torch.__version__.split("+")[0]
assert tuple(int(part) for part in version.split(".")[:2]) >= (2, 11)
assert os.environ.get("STAGELINE_TORCH") in (None, "", f"torch=={version}", f"torch=={torch.__version__}")
assert torch.accelerator.is_available() or "STAGELINE_PYTHON" in os.environ
PY
}

# Python compiles what it imports, far less than pip would compile; pip does where Python may not.
stageline_pip() {
    local compile=--no-compile
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile
    "$PYTHON" -m pip install -qq --disable-pip-version-check "$compile" "$@"
}

stageline_install_torch() {
    local torch="${STAGELINE_TORCH:-torch==2.13.0}"
    local index=()
    [ -n "${STAGELINE_TORCH_INDEX:-}" ] && index=(--index-url "$STAGELINE_TORCH_INDEX")
    if ! command -v nvidia-smi >/dev/null 2>&1 && [ -z "${STAGELINE_TORCH:-}" ]; then
        stageline_say "no GPU here: installing the CPU build of $torch"
        stageline_pip ${index[@]+"${index[@]}"} "$torch+cpu" 2>/dev/null && return
        stageline_say "pip finds no CPU build (set STAGELINE_TORCH_INDEX to an index that has it);"
        stageline_say "taking the default build, which is several GB"
    fi
    stageline_say "installing $torch"
    stageline_pip ${index[@]+"${index[@]}"} "$torch"
}

# Writes what training and these purposes need, without torch, which is there already.
stageline_write_needs() {
    "$PYTHON" - "$ROOT/pyproject.toml" "$VENV" "$@" <<'PY'
import importlib.metadata
import re
import sys
import tomllib

path, venv, *purposes = sys.argv[1:]
with open(path, "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
needs = [*project["dependencies"], *(need for purpose in purposes for need in extras[purpose])]
needs = [need for need in needs if not re.match(r"torch\b", need)]
with open(f"{venv}/needs.txt", "w") as file:
    print(*needs, sep="\n", file=file)
# no package may bring another torch
with open(f"{venv}/torch.txt", "w") as file:
    print(f"torch=={importlib.metadata.version('torch')}", file=file)
with open(f"{venv}/no-torch.txt", "w") as file:
    print("torch; python_version < '3'", file=file)
PY
}

# Installs what is missing for training and these purposes; uv does it where it is there.
stageline_install() {
    stageline_write_needs "$@"
    local lock="$ROOT/requirements.lock"
    if [ -n "${STAGELINE_TRANSFORMERS:-}" ]; then # it chooses its own tokenizers and hub client
        lock="$VENV/lock.txt"
        grep -vE '^(transformers|tokenizers|huggingface-hub)==' "$ROOT/requirements.lock" >"$lock"
        echo "$STAGELINE_TRANSFORMERS" | tee -a "$lock" >>"$VENV/needs.txt"
    fi
    local needs=(--constraint "$lock" --requirement "$VENV/needs.txt")
    if command -v uv >/dev/null 2>&1; then
        # uv does not look at the packages below the environment: it is told to leave torch alone
        uv pip install --quiet --python "$PYTHON" --override "$VENV/no-torch.txt" "${needs[@]}" && return
        stageline_say "uv could not do it; pip tries"
    fi
    stageline_pip "${needs[@]}" --constraint "$VENV/torch.txt"
}

# Shows the packages of a python that is itself in a venv: --system-site-packages would show those of the
# python below that venv instead.
stageline_see_base() {
    "$1" - "$VENV" <<'PY'
import site
import sys
from pathlib import Path

for folder in Path(sys.argv[1]).glob("lib/python*/site-packages"):
    (folder / "stageline_base.pth").write_text("\n".join(site.getsitepackages()) + "\n")
PY
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
    if stageline_has_torch "$base"; then
        stageline_say "using the torch that $base has"
        if "$base" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)'; then
            "$base" -m venv --system-site-packages "$VENV"
        else
            "$base" -m venv "$VENV"
            stageline_see_base "$base"
        fi
    else
        "$base" -m venv "$VENV"
        stageline_install_torch
        # every process imports much of it: compile it while the rest is installed
        "$PYTHON" -m compileall -q "$VENV"/lib/python*/site-packages/torch >/dev/null 2>&1 &
    fi
    stageline_pip --upgrade pip 2>/dev/null || true # the one that came with Python takes twice as long
    stageline_say "installing what training needs"
    stageline_install "$@"
    stageline_pip --constraint "$VENV/torch.txt" setuptools
    stageline_pip --no-deps --no-build-isolation --editable "$ROOT"
    wait # for torch
    stageline_mark "" "$@" # last: a killed set-up is done again
}

# A stamp for training and one for each purpose says what is complete.
stageline_mark() {
    local purpose
    for purpose in "$@"; do stageline_fingerprint >"$VENV/.stageline-ready${purpose:+-$purpose}"; done
    stageline_say "done"
}

stageline_is_ready() {
    local purpose wanted
    wanted="$(stageline_fingerprint)"
    for purpose in "$@"; do
        [ "$(cat "$VENV/.stageline-ready${purpose:+-$purpose}" 2>/dev/null)" = "$wanted" ] || return 1
    done
}

stageline_set_up() {
    local purpose
    stageline_is_ready "" "$@" && return
    for purpose in "$@"; do
        grep -q "^$purpose = \[" "$ROOT/pyproject.toml" || stageline_fail "$purpose came as a purpose." \
            "An extra of pyproject.toml was expected, because these say what to install: one of" \
            "$(sed -n '/^\[project.optional/,/^\[project.scripts/s/ = \[.*//p' "$ROOT/pyproject.toml" | paste -sd ' ')."
    done
    mkdir -p "$(dirname "$VENV")"
    exec 9>"$VENV.lock" # two scripts at once: the second waits
    if command -v flock >/dev/null 2>&1; then flock 9; fi
    if ! stageline_is_ready ""; then
        stageline_make_venv "$@"
    elif ! stageline_is_ready "$@"; then
        stageline_say "adding what is missing for $*"
        stageline_install "$@"
        stageline_mark "$@"
    fi
    exec 9>&-
}

# What --device is to be for so many stages: a GPU for each, or the CPU for all.
stageline_device() {
    if [ "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" -ge "$1" ]; then echo cuda; else echo cpu; fi
}

stageline_set_up ${STAGELINE_PURPOSES:-}
