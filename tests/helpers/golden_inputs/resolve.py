"""Resolved configs without a run: [entry file, words] as JSON lists in, YAML documents out.

Only a run writes its config, and most recipes want a model that has to be fetched; so this asks
parse_args.py, which stays an interface.
"""

import json
import sys
import tempfile
from pathlib import Path

from commands import train as train_pp  # noqa: F401 - its engines
from parse_args import parse_evaluate_args, parse_train_args, save_config
from register import import_shelf

import_shelf()
found = []
with tempfile.TemporaryDirectory() as folder:
    for entry, words in json.load(sys.stdin):
        parse = parse_train_args if entry == "train_pp.py" else parse_evaluate_args
        save_config(parse(words), Path(folder) / "config.yaml")
        found.append((Path(folder) / "config.yaml").read_text(encoding="utf-8"))
print(json.dumps(found))
