#!/usr/bin/env bash
# Adds to .venv what a purpose needs beside training; no script has to be called for it.
#   bash scripts/setup.sh                       # what training needs, as every script does
#   bash scripts/setup.sh quantization remote   # a purpose is an extra of pyproject.toml
STAGELINE_PURPOSES="$*" source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
