"""Rows of new tokens in embedding and head: made, given a start, and trained.

Only they train if that is asked for, or if their matrix is frozen: then the rows are a parameter
of their own, `<module>.new_rows.weight` [N, H], whose values stand in the place of those of the
matrix in every pass. The matrix itself is frozen: no gradient, moment or decay reaches it.
`fold_rows` writes the rows into it before it is saved, so that files hold whole matrices under the
model's own names.

Shapes: N new tokens, V rows, H hidden size.
"""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from stageline.errors import UserError
from stageline.modules.lora_layer import name_seed
from stageline.modules.methods import linear_in_float32
from stageline.modules.part_lora import module_at
from stageline.stage import Stage

Matrix = nn.Embedding | nn.Linear
ROWS = "new_rows"


@dataclass(frozen=True)
class NewRows:
    """New tokens of a stage, and how their rows start and train.

    Attributes:
        ids: of the new tokens.
        pieces: for each the ids that its text was split into before.
        fresh: those without rows in the weights that are loaded.
        train_alone: only these rows of embedding and head are trained; of a matrix that is frozen,
            with LoRA for example, they are trained in any case.
        noisy: those that start as the mean of all rows and noise, seeded by `seed`.
        multiple: rows that are added are rounded up to a multiple of this.
    """

    ids: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    fresh: frozenset[int]
    train_alone: bool = False
    noisy: frozenset[int] = frozenset()
    seed: int = 0
    multiple: int = 1

    def padded(self, before: int) -> int:
        """Return the rows of embedding and head: beyond `before` ones, rounded up."""
        needed = max(self.ids) + 1
        if needed <= before:
            return needed
        return math.ceil(needed / self.multiple) * self.multiple


def vocabulary_paths(whole: PreTrainedModel) -> tuple[str, ...]:
    """Module paths of the embedding and, if there is one, the head of a transformers model."""
    names = {id(module): name for name, module in whole.named_modules()}
    found = (whole.get_input_embeddings(), whole.get_output_embeddings())
    return tuple(names[id(module)] for module in found if id(module) in names)


def vocabulary_modules(model: nn.Module, paths: Iterable[str]) -> dict[str, Matrix]:
    """Return the modules at the paths that have a weight here: a stage may have dropped some."""
    modules = {}
    for path in paths:
        module = module_at(model, path)
        if module is not None and module._parameters.get("weight") is not None:
            modules[path] = cast(Matrix, module)
    return modules


def vocab_size_of(config: PretrainedConfig) -> int | None:
    """Return the rows of the embedding by a configuration; None: it has no such field."""
    return getattr(config.get_text_config(decoder=True), "vocab_size", None)


def set_vocab_size(config: PretrainedConfig, num_rows: int) -> None:
    """Write the number of rows to each field of a configuration that holds it."""
    before = vocab_size_of(config)
    for one in (config.get_text_config(decoder=True), config):
        if getattr(one, "vocab_size", None) == before:
            one.vocab_size = num_rows


@torch.no_grad()
def enlarge(model: nn.Module, paths: Iterable[str], num_rows: int) -> None:
    """Add rows of zeros to embedding and head up to `num_rows`; what is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    for module in vocabulary_modules(model, paths).values():
        for leaf in ("weight", "bias"):
            old = module._parameters.get(leaf)
            if old is None or old.shape[0] >= num_rows:
                continue
            if id(old) not in made:
                more = old.new_zeros(num_rows - old.shape[0], *old.shape[1:])
                made[id(old)] = nn.Parameter(torch.cat([old, more]), old.requires_grad)
            module._parameters[leaf] = made[id(old)]
        width = "num_embeddings" if hasattr(module, "num_embeddings") else "out_features"
        setattr(module, width, module.weight.shape[0])
    enlarge_hollow = getattr(model, "enlarge_hollow", None)
    if enlarge_hollow is not None:
        enlarge_hollow(tuple(paths), num_rows)
    # configurations, and what modules keep as `vocab_size`
    whole = getattr(model, "whole", None) or model
    for one in (model, *whole.modules()):
        config = getattr(one, "config", None)
        if isinstance(config, PretrainedConfig) and (vocab_size_of(config) or num_rows) < num_rows:
            set_vocab_size(config, num_rows)
        size = getattr(one, "vocab_size", None)
        if isinstance(size, int) and size < num_rows:
            cast(Any, one).vocab_size = num_rows


@torch.no_grad()
def put_new_rows(model: Stage, rows: NewRows) -> None:
    """Add rows of new tokens to a filled stage, start them, and set whether only they train.

    A new row of embedding and head starts as the mean of the rows of its pieces, which is the same
    for any number of stages.
    """
    paths = getattr(model, "vocabulary", ())
    if not paths:
        raise UserError(
            f"{type(model).__name__} has no `vocabulary`, the paths of its embedding and head. Set "
            "it in the stage model, or drop `new_tokens`."
        )
    before = vocab_size_of(model.config)
    assert before is not None  # a model with an embedding says its rows
    enlarge(model, paths, rows.padded(before))
    done: set[int] = set()
    for path, module in vocabulary_modules(model, paths).items():
        for leaf, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in done:
                done.add(id(tensor))
                _start(tensor, rows, before, name=f"{path}.{leaf}")
    model.token_ids = tuple(sorted({*getattr(model, "token_ids", ()), *rows.ids}))
    trains = getattr(model, "trained_rule", lambda: lambda _: True)()
    # rows that LoRA or a frozen part would leave as they start train by themselves
    alone = [path for path in paths if rows.train_alone or not trains(f"{path}.weight")]
    _train_alone(model, alone, rows.ids)


def _start(tensor: torch.Tensor, rows: NewRows, before: int, *, name: str) -> None:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    means = {}
    for token, pieces in zip(rows.ids, rows.pieces, strict=True):
        if token in rows.fresh or token >= before:
            source = tensor[list(pieces)] if pieces else tensor[:before]
            means[token] = source.to(dtype).mean(0)
            if token in rows.noisy and tensor.ndim == 2:
                # else rows would be equal, and stay so if tied
                seed, width = name_seed(rows.seed, f"{name}.{token}"), tensor.shape[1]
                noise = torch.randn(width, generator=torch.Generator().manual_seed(seed))
                means[token] += noise.to(tensor.device) / width**0.5
    for token, mean in means.items():
        tensor[token] = mean.to(tensor.dtype)


class TokenRows(nn.Module):
    """The rows of new tokens apart from their matrix; a child of the module with the matrix."""

    ids: torch.Tensor
    place: torch.Tensor

    def __init__(self, weight_NH: nn.Parameter, ids: torch.Tensor, num_rows: int) -> None:
        super().__init__()
        self.weight = weight_NH
        self.register_buffer("ids", ids, persistent=False)
        place = torch.full((num_rows,), -1, dtype=torch.long, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        self.register_buffer("place", place, persistent=False)


def _train_alone(model: Stage, paths: Iterable[str], ids: tuple[int, ...]) -> None:
    """Freeze the matrices and give them rows that train; tied ones have the same rows."""
    order = model.parameter_order
    for path in paths:
        if f"{path}.weight" in order:  # on every stage, so that all know the same order
            place = order.index(f"{path}.weight") + 1
            order.insert(place, f"{path}.{ROWS}.weight")
    made: dict[int, nn.Parameter] = {}
    for module in vocabulary_modules(model, paths).values():
        weight_VH = module.weight
        index = torch.tensor(ids, device=weight_VH.device)
        if id(weight_VH) not in made:
            made[id(weight_VH)] = nn.Parameter(weight_VH.detach()[index].clone())
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
        module.add_module(ROWS, TokenRows(made[id(weight_VH)], index, weight_VH.shape[0]))
        is_embedding = isinstance(module, nn.Embedding)
        module.register_forward_hook(_embed_new if is_embedding else _score_new, with_kwargs=True)


def _embed_new(
    module: nn.Embedding, args: tuple, kwargs: dict[str, torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """Put the rows in place of the values that were looked up for new tokens."""
    rows = cast(TokenRows, module.get_submodule(ROWS))
    place = rows.place[args[0] if args else kwargs["input"]]
    # the class's own forward runs over only these rows, as it may scale what it looks up
    view = copy.copy(module)
    view.__dict__["_parameters"] = {"weight": rows.weight}
    view.padding_idx = None
    own = type(module).forward(view, place.clamp(min=0))
    return torch.where((place >= 0).unsqueeze(-1), own, hidden)


def _score_new(
    module: nn.Linear, args: tuple, kwargs: dict[str, torch.Tensor], logits: torch.Tensor
) -> torch.Tensor:
    """Put the logits of new tokens into their places."""
    rows = cast(TokenRows, module.get_submodule(ROWS))
    bias = None if module.bias is None else module.bias[rows.ids]
    is_exact = logits.dtype == torch.float32 != rows.weight.dtype
    own = (linear_in_float32 if is_exact else F.linear)(
        args[0] if args else kwargs["input"], rows.weight, bias
    )
    # in place: another tensor of this size is the largest of a step
    return logits.index_copy_(-1, rows.ids, own.to(logits.dtype))


@torch.no_grad()
def fold_rows(model: nn.Module) -> None:
    """Write the rows into their matrices, where nothing else changes."""
    for module in model.modules():
        rows = module._modules.get(ROWS)
        if isinstance(rows, TokenRows):
            weight = cast(Matrix, module).weight
            ids = rows.ids.to(weight.device)
            weight.index_copy_(0, ids, rows.weight.detach().to(weight))


def is_row_name(name: str) -> bool:
    """Whether a parameter's name is that of rows of new tokens."""
    return name.endswith(f".{ROWS}.weight")


# NEFTune (Jain et al. 2023, arXiv 2310.05914): noise on token embeddings, in training only.
# It is drawn as in transformers' trainer: uniform between +-alpha / sqrt(T H), with T the tokens of
# a row, padding included. `LayerSeeds` seeds the draw, so that it follows only from seed, step and
# micro-batch; images take the places of their tokens after it and stay as they are.

ALPHA = "neftune_alpha"


def add_noise(model: nn.Module, paths: Iterable[str], alpha: float) -> None:
    """Put noise on the embeddings of this stage, after all other changes to them."""

    def noisy(module: nn.Module, args: tuple, hidden_BTH: torch.Tensor) -> torch.Tensor | None:
        if not module.training:
            return None
        most = alpha / (hidden_BTH.shape[1] * hidden_BTH.shape[2]) ** 0.5
        return hidden_BTH + torch.empty_like(hidden_BTH).uniform_(-most, most)

    for module in vocabulary_modules(model, paths).values():
        if isinstance(module, nn.Embedding):
            setattr(module, ALPHA, alpha)
            module.register_forward_hook(noisy)


def noisy_modules(model: nn.Module) -> list[nn.Module]:
    """The embeddings that draw in training."""
    return [module for module in model.modules() if hasattr(module, ALPHA)]
