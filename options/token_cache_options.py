"""The options of a run about token ids that are kept."""

from dataclasses import dataclass

from options.fields import OptionError, option


@dataclass(kw_only=True)
class TokenCacheOptions:
    """Token cache"""

    token_cache: str | None = option(
        None,
        "folder that keeps the token ids of all rows for later epochs and runs; default: none is "
        "kept",
        is_output=True,
    )
    token_cache_workers: int = option(
        0, "processes that fill --token-cache before training; 0: the run's own", at_least=0
    )


def check_token_cache(run: TokenCacheOptions) -> None:
    """Refuses processes that would fill nothing."""
    if run.token_cache_workers and run.token_cache is None:
        raise OptionError(
            f"--token-cache-workers {run.token_cache_workers} came without --token-cache. They "
            "fill that folder, and nothing is kept without one. Add --token-cache FOLDER."
        )
