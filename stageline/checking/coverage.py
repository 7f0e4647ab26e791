"""Who owns what: keys of the checkpoint, parameters, and what is trained. Names only, no values."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stageline.checking.report import Report


@dataclass(frozen=True)
class StageFacts:
    """What a stage says about itself.

    Attributes:
        names: of its parameters.
        trained: of them, those that are trained.
        keys: names on disk that were read for it.
        layers: how many layers of the partition it has.
    """

    stage: int
    names: tuple[str, ...]
    trained: tuple[str, ...]
    keys: frozenset[str]
    layers: int


def stage_facts(model: Any, files: Iterable[str]) -> StageFacts:
    """The facts of a stage model.

    Args:
        files: all names on disk, for a part that loads its weights by itself.
    """
    named = dict(model.named_parameters())
    keys = getattr(model, "keys_read", None)
    if keys is None:
        keys = set(model.get_key_map_without_last_lora().values()) & set(files)
    return StageFacts(
        stage=model.stage,
        names=tuple(named),
        trained=tuple(name for name, parameter in named.items() if parameter.requires_grad),
        keys=frozenset(keys),
        layers=model.partition[model.stage],
    )


def holders(facts: Sequence[StageFacts], names_of: str) -> dict[str, list[int]]:
    """Name -> the stages that have it, of `names`, `trained` or `keys`."""
    found: dict[str, list[int]] = {}
    for fact in facts:
        for name in getattr(fact, names_of):
            found.setdefault(name, []).append(fact.stage)
    return found


def tied_names(model: nn.Module) -> set[str]:
    """Names of weights that the whole model uses under several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}


def check_keys(
    report: Report,
    facts: Sequence[StageFacts],
    *,
    files: Iterable[str],
    tied: set[str],
    passed_over: Iterable[str] = (),
) -> None:
    """Every key of the checkpoint is read by one stage; a tied one may be by two.

    Args:
        passed_over: patterns of keys that the library leaves out as well.
    """
    owners = holders(facts, "keys")
    files = set(files)
    patterns = [re.compile(pattern) for pattern in passed_over]
    unread = {
        key for key in files - set(owners) if not any(found.search(key) for found in patterns)
    }
    twice = {key: stages for key, stages in owners.items() if len(stages) > 1}
    # a key may have another name than the parameter: the tied ones are counted
    num_tied = sum(len(stages) > 1 for name, stages in holders(facts, "names").items()
                   if name in tied)  # fmt: skip
    details = [f"{key} belongs to no stage" for key in sorted(unread)]
    if len(twice) > num_tied:
        details += [
            f"{key} belongs to stages {', '.join(map(str, stages))}"
            for key, stages in sorted(twice.items())
        ]
    figure = f"{len(files)} keys, {len(unread)} on no stage, {len(twice)} on several"
    if not details:
        figure = f"{len(files)} keys, each on one stage"
        figure += f"; {len(twice)} tied" if twice else ""
    report.add("keys of the checkpoint", not details, figure, details)


def check_names(
    report: Report, facts: Sequence[StageFacts], *, whole: Iterable[str], tied: set[str]
) -> None:
    """The stages together have the parameters of the whole model, each once."""
    owners, whole = holders(facts, "names"), list(whole)
    details = [f"{name} is on no stage" for name in whole if name not in owners]
    for name, stages in owners.items():
        where = ", ".join(map(str, stages))
        if name not in whole:
            details.append(f"{name} (stage {where}) is in no whole model")
        elif len(stages) > 1 and name not in tied:
            details.append(f"{name} is on stages {where}, and not tied")
    num_tied = sum(len(stages) > 1 for stages in owners.values())
    figure = f"{len(owners)} on the stages, {len(whole)} in the whole model"
    figure += f", {num_tied} on several stages" if num_tied else ""
    report.add("parameter names", not details, figure, details)


def check_trained(
    report: Report, facts: Sequence[StageFacts], *, trains: Mapping[str, bool]
) -> None:
    """A stage trains what the part trains on one stage."""
    details = []
    for fact in facts:
        for name in fact.names:
            if trains.get(name) not in (None, name in fact.trained):
                here, there = ("trained", "frozen")[:: 1 if name in fact.trained else -1]
                details.append(f"{name} (stage {fact.stage}): {here} here, {there} on one stage")
    num_trained = len(holders(facts, "trained"))
    figure = f"{num_trained} of {len(holders(facts, 'names'))} parameters are trained"
    report.add("same parameters trained", not details, figure, details)
