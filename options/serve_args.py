"""The options of serve.py -> its run config, the kwargs of each chosen part, and the API keys."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from options.checks import check_precision
from options.fields import OptionError, check_limits
from options.http_options import check_certificate
from options.image_options import check_images
from options.model_options import check_has_model
from options.serve_options import ServeConfig
from parse_args import Arguments, read_arguments

# register -> key that is taken when none is given; as in parse_args.py
SERVE_KEYS: dict[str, str | None] = {"prompt_fn": "chat", "image_token": "auto"}
LEAST_LETTERS = 8


@dataclass
class ServeArguments(Arguments):
    """What `serve.py` runs."""

    run: ServeConfig


def parse_serve_args(argv: Sequence[str] | None = None) -> ServeArguments:
    """Reads the options of a server; raises as `parse_train_args` does."""
    run, parts, imports = read_arguments(argv, ServeConfig, keys=SERVE_KEYS)
    check_limits(run)
    check_precision(run)
    check_images(run)
    check_has_model(run)
    check_certificate(run)
    return ServeArguments(run=run, parts=parts, imports=imports)


def read_api_keys(run: ServeConfig) -> tuple[str, ...]:
    """The keys that let requests in; none: everybody may ask.

    Raises:
        OptionError: what was named holds none, or one that is easily guessed.
    """
    keys: list[str] = []
    if run.api_key_env is not None:
        keys += _of(os.environ.get(run.api_key_env, ""), f"--api-key-env {run.api_key_env}")
    if run.api_key_file is not None:
        text = Path(run.api_key_file).read_text(encoding="utf-8")
        keys += _of(text, f"--api-key-file {run.api_key_file}")
    return tuple(dict.fromkeys(keys))


def _of(text: str, source: str) -> list[str]:
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise OptionError(
            f"{source} holds no key. At least one was expected, because without one everybody "
            "could ask: set it, or leave the option out if that is meant."
        )
    for number, key in enumerate(keys):
        if len(key) < LEAST_LETTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise OptionError(
                f"{source}: key {number + 1} has {len(key)} letters. At least {LEAST_LETTERS} of "
                "ASCII without spaces were expected, because it is sent in a header and must not "
                "be guessed: make one with `openssl rand -hex 24`."
            )
    return keys
