"""Split plans that forked processes found, for those that are forked later.

A plan follows only from a model's configuration, and to find it is half the start of a small
model: the first ranks of a test process that build a model find it, and later ones reuse it.
"""

import atexit
import functools
import os
import pickle
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from stageline.stages import causal_lm, vision_language  # noqa: F401 - what forks import, too
from stageline.stages.discover import _PLANS


def learn_plans() -> None:
    """Takes over what forks of this process have found; called before it forks again."""
    for file in _folder().glob("*.plan"):
        if file not in _READ:
            _READ.add(file)
            key, plan = pickle.loads(file.read_bytes())
            _PLANS.setdefault(key, plan)


def leave_plans() -> None:
    """Writes down what this process, a fork, has found."""
    folder = _folder()
    for key, plan in _PLANS.items():
        file = folder / f"{sha256(key.encode()).hexdigest()}.plan"
        if folder.is_dir() and not file.exists():
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_bytes(pickle.dumps((key, plan)))
            draft.rename(file)


_READ: set[Path] = set()


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="plans-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
