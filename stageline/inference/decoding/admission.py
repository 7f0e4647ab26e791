"""What a request must be to be taken."""

from dataclasses import replace
from typing import TYPE_CHECKING

from stageline.errors import UserError
from stageline.inference.decoding import prompts
from stageline.inference.decoding.request import Request, ScoreRequest
from stageline.inference.decoding.scheduler import Limits

if TYPE_CHECKING:
    from stageline.inference.decoding.engine import DecodingEngine


def admitted(request: Request, engine: "DecodingEngine") -> Request:
    """The request as it runs.

    Raises:
        UserError: it can't be answered.
    """
    cells = engine.prompt_cells(request.prompt)
    request = checked(request, engine.limits, has_cache=engine.has_cache, cells=cells)
    sampling = request.sampling
    if sampling.grammar is None:
        return request
    engine.matchers.check(sampling.grammar)
    # the last stage has to know which tokens may come just where the grammar may end
    own = sampling.stop_token_ids
    ids = engine.stop_ids if own is None else own
    return replace(request, sampling=replace(sampling, stop_token_ids=ids))


def checked(request: Request, limits: Limits, *, has_cache: bool, cells: int = 0) -> Request:
    """The request, its answer no longer than there are positions and room.

    Args:
        cells: of the cache, that its images take.

    Raises:
        UserError: there is no room for one token, or the model can't take images here.
    """
    length = prompts.length_of(request.prompt)
    room = limits.max_length if limits.max_cells is None else limits.max_cells - cells
    longest = min(limits.max_length, room)
    if not 1 <= length < longest:
        images = f", and its images take as much room as {cells} more" if cells else ""
        raise UserError(
            f"the prompt has {length} tokens{images}. From 1 to {longest - 1} were expected, "
            "because the prompt and at least one token of the answer must fit the model's "
            "positions and the cache: shorten it."
        )
    if not has_cache and prompts.is_alone(request.prompt):
        raise UserError(
            "the prompt came with images. Text alone was expected, because this model keeps no "
            "keys and values (can_decode is False), and would look at them for every token."
        )
    most = min(request.sampling.max_new_tokens, longest - length)
    return replace(request, sampling=replace(request.sampling, max_new_tokens=most))


def check_row(item: ScoreRequest, limits: Limits) -> None:
    """Refuses a row that can't be scored.

    Raises:
        UserError: it has too many tokens, or no token before the first target.
    """
    length = prompts.length_of(item.prompt)
    if length > limits.max_length + 1:
        raise UserError(
            f"the row has {length} tokens. At most {limits.max_length + 1} were expected, because "
            "all but the last must fit the model's positions: shorten it."
        )
    if not 1 <= item.num_targets < length:
        raise UserError(
            f"{item.num_targets} of the row's {length} tokens are to be scored. From 1 to "
            f"{length - 1} were expected, because a token is scored by those before it."
        )
