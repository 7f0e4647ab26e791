"""Compile cards.cpp once and load it, before torch, which asks for it only once.

The compiled file is in `.cache/`, under a name that changes with the source and with torch.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("cards.cpp")
CACHE = ROOT / ".cache" / "emulated_gpu"
MOST_CARDS = 4  # kMost in cards.cpp has the same value
KIND = os.environ.get("EMULATED_KIND", "cuda")  # or any word but a kind of torch's


class Unavailable(RuntimeError):
    """No card can be emulated in this process; the message says why."""


def load() -> ctypes.CDLL:
    """Load the compiled guard and hooks into this process; the first time takes 15 s of g++.

    Raises:
        Unavailable: torch is imported already, a real card is here, or nothing compiles C++.
    """
    if "torch" in sys.modules:
        raise Unavailable(
            "torch was imported before the emulated cards: load them by PYTEST_PLUGINS"
        )
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise Unavailable("torch is not installed")
    torch = Path(found.origin).parent
    has_card = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    if (torch / "lib" / "libtorch_cuda.so").exists() and has_card:
        raise Unavailable("a real card is here, and this torch is built for it")
    if (torch / "lib" / "libtorch_hip.so").exists():
        raise Unavailable("this torch is built for AMD: install its CPU build to emulate a card")
    content = SOURCE.read_bytes() + (torch / "version.py").read_bytes()
    library = CACHE / f"cards-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not library.exists():
        _compile(torch, library)
    cards = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for name in ("cards_stream", "cards_new_id"):
        getattr(cards, name).restype = ctypes.c_long
    cards.cards_set_stream.argtypes = [ctypes.c_int, ctypes.c_long]
    cards.cards_register(KIND == "cuda")
    return cards


def _compile(torch: Path, library: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise Unavailable("no C++ compiler is installed (g++, or the one that CXX names)")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        words = [compiler, "-O0", "-std=c++20", "-fPIC", "-shared", str(SOURCE), "-o", str(made)]
        words += [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(
            [*words, f"-Wl,-rpath,{torch / 'lib'}"], capture_output=True, text=True
        )
        if done.returncode:
            raise Unavailable(f"{compiler} can't compile {SOURCE}:\n{done.stderr[-2000:]}")
        os.replace(made, library)  # workers of one run compile at the same time
