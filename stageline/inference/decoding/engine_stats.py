"""What an engine tells about itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stageline.inference.decoding.scheduler import Scheduler


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

    @classmethod
    def of(
        cls,
        scheduler: "Scheduler",
        *,
        num_waiting: int,
        tokens: tuple[int, int],
        is_healthy: bool,
        stage_seconds: tuple[float, ...],
    ) -> "EngineStats":
        """What a scheduler knows, and the rest.

        Args:
            num_waiting: besides those that wait in the scheduler.
            tokens: of prompts and of answers.
        """
        return cls(
            queued=len(scheduler.waiting) + num_waiting,
            running=scheduler.num_running,
            max_running=scheduler.limits.max_rows,
            prompt_tokens=tokens[0],
            completion_tokens=tokens[1],
            num_groups=len(scheduler.groups),
            cache_cells=scheduler.num_cells,
            max_cache_cells=scheduler.limits.max_cells,
            is_healthy=is_healthy,
            stage_seconds=stage_seconds,
        )
