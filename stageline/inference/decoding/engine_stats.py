"""What an engine tells about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Where the engine stands.

    Attributes:
        prompt_tokens, completion_tokens: read and made since the start.
        cache_cells, max_cache_cells: rows times columns of caches; None: no limit.
        stage_seconds: how long each stage has worked.
    """

    queued: int
    running: int
    max_running: int
    prompt_tokens: int
    completion_tokens: int
    num_groups: int
    cache_cells: int
    max_cache_cells: int | None
    is_healthy: bool
    stage_seconds: tuple[float, ...] = ()
