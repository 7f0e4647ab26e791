"""The rewards of the study: all views of a scene, and options by the meaning of what is said."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from examples.spatial.answers import parse_choice, parse_directions
from stageline.evaluation.rewards import is_answer, references, right_choice, said

Sample = Mapping[str, Any]


def spatial_consistency(
    prompts: Sequence[str],
    completions: Sequence[str],
    samples: Sequence[dict[str, Any]],
    *,
    view_of: str = "contrast_group",
) -> list[float | None]:
    """1 where the answers to all views of a scene are right: mirrored, rotated or rephrased.

    Nothing for a sample without another view in the same step: keep the views of a scene together
    by a dataset with groups (arXiv 2506.01371).

    Args:
        view_of: field that views of one scene share.
    """
    return agreement(completions, samples, field=view_of, is_right=is_spatially_right)


def spatial_choice(
    prompts: Sequence[str], completions: Sequence[str], samples: Sequence[dict[str, Any]]
) -> list[float | None]:
    """Like choice; "upper left", "no, it is not" or "at three" name an option by their meaning."""
    found: list[float | None] = []
    for text, sample in zip(completions, samples, strict=True):
        right, choices = right_choice(sample, read=parse_choice), list(map(str, sample["choices"]))
        named = parse_choice(said(text), choices, question=sample.get("question"))
        found.append(float(named == right))
    return found


def agreement(
    completions: Sequence[str],
    samples: Sequence[Sample],
    *,
    field: str,
    is_right: Callable[[str, Sample], bool],
) -> list[float | None]:
    """1 where the answers to all views of a scene are right, else 0; None of one without others.

    The first answer to a view goes with the first one to each other view, and so on.
    """
    scenes: dict[Any, dict[Any, list[int]]] = {}
    for place, sample in enumerate(samples):
        scene = sample.get(field)
        if scene is not None:
            view = sample.get("id", sample.get("source"))
            scenes.setdefault(scene, {}).setdefault(view, []).append(place)
    found: list[float | None] = [None] * len(completions)
    for views in scenes.values():
        if len(views) < 2:
            continue
        for places in zip(*views.values(), strict=False):
            agree = all(is_right(completions[place], samples[place]) for place in places)
            for place in places:
                found[place] = float(agree)
    return found


def is_spatially_right(completion: str, sample: Sample) -> bool:
    """Return whether an answer is right, or names the right directions."""
    if is_answer(completion, sample):
        return True
    asked = sample.get("question")
    directions = parse_directions(said(completion), question=asked)
    return any(directions == parse_directions(one) for one in references(sample) if directions)
