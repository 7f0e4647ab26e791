#!/usr/bin/env bash
# Adds the packages of a purpose to .venv; every script does so itself on first use.
#   bash scripts/setup.sh                       # what training needs, as every script does
#   bash scripts/setup.sh quantization remote   # a purpose is an extra of pyproject.toml
STAGELINE_PURPOSES="$*" source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
