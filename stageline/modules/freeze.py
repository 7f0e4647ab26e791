"""Which parameters of a language model train when only some of its layers are to.

Rules are about the names and layer numbers of the whole model, so that each stage answers alike for
its share. Not here: towers and projectors, which have options of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stageline.errors import UserError

ALL = "all"


@dataclass(frozen=True)
class FreezeRule:
    """What trains of a language model; all else of it, and of its head, is frozen.

    Attributes:
        num_layers: above 0 the last so many layers, below 0 the first.
        modules: names inside a layer, such as `mlp` or `q_proj`; `all`: the whole layer.
        extra: modules outside the layers, such as `norm`, `embed_tokens` or `lm_head`.
        spreads: the layers are spread evenly, the last of each group of equal size: those that
            LLaMA-Pro (Wu et al. 2024, arXiv 2401.02415) put behind the others.
    """

    num_layers: int
    modules: tuple[str, ...] = (ALL,)
    extra: tuple[str, ...] = ()
    spreads: bool = False

    def layers(self, total: int) -> range:
        """Global indices of the layers that train.

        Raises:
            UserError: there are not as many, or they are no whole groups.
        """
        wanted = abs(self.num_layers)
        if wanted > total:
            raise UserError(
                f"--freeze-trainable-layers {self.num_layers} came for a model of {total} layers; "
                f"{total} at most can train. Give a smaller number, or leave it out to train all."
            )
        if not self.spreads:
            return range(total - wanted, total) if self.num_layers > 0 else range(wanted)
        if total % wanted:
            raise UserError(
                f"--use-llama-pro with --freeze-trainable-layers {wanted} came for a model of "
                f"{total} layers; a number that divides {total} was expected: the last layer of "
                "each group of equal size trains. Give as many as blocks were added by "
                "scripts/expand_blocks.sh (--num-expand)."
            )
        stride = total // wanted
        return range(stride - 1, total + stride - 1, stride)

    def names(
        self, names: Sequence[str], *, layers: str, total: int, embedding: str, head: str
    ) -> frozenset[str]:
        """The parameters that train.

        Args:
            names: of all parameters of the language model and its head, a tied one once.
            layers: path of the list of layers.
            embedding, head: paths of both; a head that is tied has the embedding's weight.

        Raises:
            UserError: a module that the model has not.
        """
        inside, outside = _sort(names, layers)
        chosen = set(self.layers(total))
        known = {ALL, *_inner_names(inside.values())}
        _check("--freeze-trainable-modules", self.modules, known, "a layer")
        found = {
            name
            for name, (index, path) in inside.items()
            if index in chosen and (ALL in self.modules or set(self.modules) & set(path))
        }
        leaves = {path.rpartition(".")[2]: path for path in outside.values()}
        is_tied = bool(head) and f"{head}.weight" not in outside
        if is_tied:  # one weight, whichever of its names is said
            leaves[head.rpartition(".")[2]] = embedding
        where = "what is outside the layers"
        _check("--freeze-extra-modules", self.extra, leaves, where)
        paths = {leaves[name] for name in self.extra}
        return frozenset(found | {name for name, path in outside.items() if path in paths})


def _check(option: str, given: Iterable[str], known: Iterable[str], where: str) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UserError(
            f"{option} has {', '.join(unknown)}, a module of {where} was expected: its parameters "
            f"train. Choose from {', '.join(sorted(known))}."
        )


def _sort(
    names: Iterable[str], layers: str
) -> tuple[dict[str, tuple[int, list[str]]], dict[str, str]]:
    """Parameters in layers -> (layer, modules on the way); others -> path of their module."""
    inside, outside = {}, {}
    for name in names:
        rest = name.removeprefix(layers + ".").split(".")
        if name.startswith(layers + "."):
            inside[name] = int(rest[0]), rest[1:-1]
        else:
            outside[name] = name.rpartition(".")[0]
    return inside, outside


def _inner_names(inside: Iterable[tuple[int, list[str]]]) -> set[str]:
    return {part for _, path in inside for part in path if not part.isdigit()}
