"""The builder parts (path -> model, processor, device_map) and the inference model parts."""

from models import builders, generate, likelihood, remote

__all__ = ["builders", "generate", "likelihood", "remote"]
