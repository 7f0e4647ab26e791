"""The options of where a model lies that answers: evaluate.py, infer.py and chat.py."""

import re
from dataclasses import dataclass
from typing import Any

from options.fields import OptionError, option

_UNITS = {"": 1024**3, "g": 1024**3, "gib": 1024**3, "gb": 10**9, "mib": 1024**2, "mb": 10**6}


@dataclass(kw_only=True)
class PlacementOptions:
    """Devices"""

    visual_gpu_ratio: float | None = option(
        None,
        "share of the first device that the vision tower takes: layers are dealt out by number; "
        "default: by measured bytes",
        at_least=0,
    )
    plan: bool = option(False, "show what would lie on which device, load nothing, and stop")
    device_memory: list[str] | None = option(
        None,
        "free memory of each device, 24GiB,48GiB, or of all of them, 24GiB; default: they are "
        "asked. With --plan they need not exist",
    )
    plan_length: int = option(
        2048, "tokens of the longest prompt with its answer, for --plan and the cut", at_least=2
    )
    plan_images: int = option(
        1, "images of a row (tiles count each) for --plan and the cut", at_least=0
    )


def check_placement(run: Any) -> None:
    """Refuses sizes that cannot be read, and a number of them that fits no machine."""
    device_memory(run)


def device_memory(run: Any) -> tuple[int, ...] | None:
    """Bytes of each device; None where the devices are to be asked."""
    if not run.device_memory:
        return None
    sizes = tuple(_bytes(text) for text in run.device_memory)
    count = run.num_devices or len(sizes)
    if len(sizes) not in (1, count):
        raise OptionError(
            f"--device-memory {','.join(run.device_memory)} names {len(sizes)} devices, and "
            f"--num-devices {count} came. One size for all or one for each was expected, because "
            "layers are dealt out by them: change one of the two."
        )
    return sizes if len(sizes) == count else sizes * count


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise OptionError(
            f"--device-memory {text} cannot be read. A size such as 24GiB, 80GB or 24 (GiB) was "
            "expected, because layers are dealt out by it: write a number above 0 and its unit."
        )
    return int(float(match[1]) * unit)
