"""Modules that are trained whole beside LoRA: `modules_to_save` of `peft`, told by name.

A weight that two modules share (embedding and tied head) is trained under both names.
"""

from collections.abc import Iterable

from torch import nn

from stageline.errors import UserError
from stageline.modules.lora import MAX_NAMES_SHOWN, is_target, strip_lora


def find_whole_modules(whole: nn.Module, wanted: Iterable[str]) -> frozenset[str]:
    """Full paths of the modules that names mean: last names, endings or expressions.

    Args:
        whole: the model before anything is dropped.

    Raises:
        UserError: a name means no module with parameters.
    """
    paths = {name for name, _ in whole.named_modules() if name}
    filled = {name for name in paths if any(True for _ in whole.get_submodule(name).parameters())}
    chosen: set[str] = set()
    for one in wanted:
        found = {name for name in filled if is_target(name, [one])}
        if not found:
            endings = sorted({name.rpartition(".")[2] for name in filled})
            names = [name for name in endings if not name.isdecimal()][:MAX_NAMES_SHOWN]
            raise UserError(
                f"--modules-to-save {one} is no module with weights of {type(whole).__name__}, one "
                f"was expected: it is trained whole beside LoRA. Name one of {', '.join(names)}."
            )
        chosen |= found
    return frozenset(chosen | _tied_to(whole, chosen))


def _tied_to(whole: nn.Module, chosen: set[str]) -> set[str]:
    shared = {
        id(parameter)
        for name, parameter in whole.named_parameters(remove_duplicate=False)
        if is_inside(name, chosen)
    }
    return {
        name.rpartition(".")[0]
        for name, parameter in whole.named_parameters(remove_duplicate=False)
        if id(parameter) in shared and not is_inside(name, chosen)
    }


def is_inside(parameter: str, modules: Iterable[str]) -> bool:
    """Whether a parameter lies in one of the modules."""
    plain = strip_lora(parameter)
    return any(plain.startswith(module + ".") for module in modules)
