#!/usr/bin/env bash
# Makes a native folder of an InternVL2 checkpoint of the class InternVLChatModel (remote code):
#   bash scripts/convert_internvl.sh InternVL2-8B InternVL2-8B-native
# No code of the old folder runs; holds one of its files of weights in memory at a time.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

exec "$PYTHON" "$ROOT/scripts/convert_internvl.py" "$@"
