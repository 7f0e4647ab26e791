"""What a report of a bug should say: versions, devices, cores and memory of this machine."""

import importlib.metadata
import os
import platform

PACKAGES = ("torch", "transformers", "datasets", "peft", "accelerate")


def describe() -> str:
    """A line each."""
    lines = [("stageline", _version("stageline")), ("python", platform.python_version())]
    lines += [(name, _version(name)) for name in PACKAGES]
    lines += [("system", platform.platform()), *_devices()]
    lines += [("cores", _cores()), ("memory", _memory())]
    return "\n".join(f"{name:<14}{value}" for name, value in lines)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        return [("CUDA", f"torch can't be imported: {error}")]
    if not torch.cuda.is_available():
        return [("CUDA", f"no device; torch was built for CUDA {torch.version.cuda or 'none'}")]
    found = [("CUDA", str(torch.version.cuda))]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append((f"device {index}", f"{about.name}, {about.total_memory / 2**30:.1f} GiB"))
    return found


def _cores() -> str:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return f"{os.cpu_count()}" + (f", {allowed} for this process" if allowed else "")


def _memory() -> str:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB"
