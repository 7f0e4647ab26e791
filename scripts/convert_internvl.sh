#!/usr/bin/env bash
# Moved: python tools/convert_internvl.py
echo "error: scripts/convert_internvl.sh is python tools/convert_internvl.py now; its options are the same." >&2
exit 2
