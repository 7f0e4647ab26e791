"""Arms the faults of a new Python that a test starts with this folder on its PYTHONPATH."""

import importlib
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
sys.path.insert(0, ROOT)
importlib.import_module("tests.helpers.faults").arm()
sys.path.remove(ROOT)
