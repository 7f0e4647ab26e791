"""Takes the place of the recipes' python: notes its words, makes the folders that they look for."""

import json
import os
import sys

words = sys.argv[1:]
with open(os.environ["GOLDEN_CALLS"], "a") as file:
    file.write(json.dumps(words) + "\n")
for name, value in zip(words, words[1:]):
    if name == "--output-dir" and value.startswith(os.environ["TMPDIR"]):
        os.makedirs(f"{value}/checkpoints/step-00000001", exist_ok=True)
if words[0].endswith("make_scenes_model.py"):
    os.makedirs(words[1])
