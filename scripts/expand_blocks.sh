#!/usr/bin/env bash
# Moved: python tools/expand_blocks.py
echo "error: scripts/expand_blocks.sh is python tools/expand_blocks.py now; its options are the same." >&2
exit 2
