"""Settings for partial training besides LoRA: frozen layers, RoPE scaling, quantization.

Plain objects; the options are in `options/model.py`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline.errors import UserError, spelled
from stageline.modules.lora import MAX_NAMES_SHOWN, is_target, strip_lora
from stageline.modules.pass_through import DONE, PassThrough
from stageline.modules.quantised import Quantization, base_bytes, quantise_layers

ALL = "all"


@dataclass(frozen=True)
class FreezeRule:
    """Layers and modules of a language model that train; the rest of it and of its head is frozen.

    They are named as in the whole model, so that each stage can find its share.

    Attributes:
        num_layers: above 0: that many of the last layers; below 0: of the first.
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
        """Global indices of the layers that train."""
        wanted = abs(self.num_layers)
        if wanted > total:
            raise UserError(
                f"`freeze.layers` {self.num_layers}: the model has {total} layers. Give a smaller "
                "number, or drop it to train all."
            )
        if not self.spreads:
            return range(total - wanted, total) if self.num_layers > 0 else range(wanted)
        if total % wanted:
            raise UserError(
                f"`freeze.layers` {wanted} does not divide {total}, the layers of the model. Give "
                "the number of blocks that tools/expand_blocks.py added."
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
        """
        inside: dict[str, tuple[int, list[str]]] = {}  # -> (layer, modules on the way)
        outside: dict[str, str] = {}  # -> path of its module
        for name in names:
            if name.startswith(layers + "."):
                index, *path, _ = name.removeprefix(layers + ".").split(".")
                inside[name] = int(index), path
            else:
                outside[name] = name.rpartition(".")[0]
        leaves = {path.rpartition(".")[2]: path for path in outside.values()}
        if head and f"{head}.weight" not in outside:  # tied: one weight under either name
            leaves[head.rpartition(".")[2]] = embedding
        inner = {part for _, path in inside.values() for part in path if not part.isdigit()}
        for option, given, known in (
            ("freeze.modules", self.modules, {ALL, *inner}),
            ("freeze.extra", self.extra, set(leaves)),
        ):
            if unknown := [name for name in given if name not in known]:
                raise UserError(
                    f"`{option}` has {', '.join(unknown)}, which the model lacks there. Choose "
                    f"from {', '.join(sorted(known))}."
                )
        chosen = set(self.layers(total))
        found = {
            name
            for name, (index, path) in inside.items()
            if index in chosen and (ALL in self.modules or set(self.modules) & set(path))
        }
        paths = {leaves[name] for name in self.extra}
        return frozenset(found | {name for name, path in outside.items() if path in paths})


# Parts of a half-precision model that compute in float32: its norms, and the logits of its head.
# These are hooks on the modules of transformers, so that parameter names stay.

HALF_TYPES = (torch.bfloat16, torch.float16)


def norms_to_float32(model: nn.Module) -> None:
    """Keep and compute every norm of a half model in float32; what it gives is half again."""

    def in_float32(
        forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor:
        return forward(hidden.float(), *args, **kwargs).to(hidden.dtype)

    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_half = own and all(one.ndim == 1 and one.dtype in HALF_TYPES for one in own)
        if "norm" in type(module).__name__.lower() and is_half:
            for parameter in own:
                parameter.data = parameter.data.float()
            module.forward = functools.partial(in_float32, module.forward)


class _LinearInFloat32(torch.autograd.Function):
    """x W^T in float32 of half factors, of which no copy in float32 lives longer than its product.

    A product of two half numbers is exact in float32, so that only sums are rounded.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        if x_NI.is_cuda and x_NI.dtype == weight_OI.dtype:
            return torch.mm(x_NI, weight_OI.T, out_dtype=torch.float32)
        found_NO = x_NI.new_empty(len(x_NI), len(weight_OI), dtype=torch.float32)
        x_NI = x_NI.float()
        for rows, found in _row_chunks(weight_OI, found_NO.T):
            torch.mm(x_NI, rows.float().T, out=found.T)
        return found_NO

    @staticmethod
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight = (_is_reached(node) for node, _ in ctx.next_functions)
        if x_NI.is_cuda and x_NI.dtype == weight_OI.dtype:
            # a half head rounds here too, and float32 products take 14 times as long on an H200
            grad_NO = grad_NO.to(x_NI.dtype)
            return (
                grad_NO @ weight_OI if wants_x else None,
                grad_NO.T @ x_NI if wants_weight else None,
            )
        grad_x = torch.zeros_like(x_NI, dtype=torch.float32) if wants_x else None
        grad_weight = torch.empty_like(weight_OI) if wants_weight else None
        exact_NI = x_NI.float()
        for place, (rows, grads) in enumerate(_row_chunks(weight_OI, grad_NO.T)):
            if grad_x is not None:
                grad_x.addmm_(grads.T, rows.float())
            if grad_weight is not None:
                start = place * HEAD_ROWS
                grad_weight[start : start + HEAD_ROWS] = grads @ exact_NI
        return None if grad_x is None else grad_x.to(x_NI.dtype), grad_weight


def _is_reached(node: Any) -> bool:
    """Whether the running backward pass wants a gradient there; zero-bubble schedules split it."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad was asked about
        return True


HEAD_ROWS = 1024  # rows of a weight at a time: on a CPU they stay in its cache


def _row_chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(one.split(HEAD_ROWS) for one in tensors), strict=True)


def linear_in_float32(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b [..., O] in float32, with gradients in the dtypes of the factors."""
    found = _LinearInFloat32.apply(x.flatten(0, -2), weight_OI).unflatten(0, x.shape[:-1])
    return found if bias_O is None else found + bias_O.float()


def head_in_float32(head: nn.Module) -> None:
    """Compute the logits of a half head, with its adapters, in float32; weights stay half."""
    for module in head.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            if module.weight.dtype in HALF_TYPES:
                module.forward = functools.partial(  # type: ignore[method-assign]
                    lambda own, x: linear_in_float32(x, own.weight, own.bias), module
                )
    # a head of another class rounds its logits once, but capping and scaling do not round again
    head.register_forward_hook(
        lambda module, args, logits: logits.float() if logits.dtype in HALF_TYPES else None
    )


# Rotary positions for texts longer than a model was trained for, written into its configuration.
# transformers reads all of it from `config.rope_parameters`: the model code is as it was, every
# stage computes the same frequencies, and a saved folder computes them again.

RopeKind = Literal["linear", "dynamic", "yarn", "llama3"]
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0
PLAIN = "default"
# layers of these kinds see no further than their window, which does not grow
_WINDOWED = ("sliding", "chunked")


@dataclass(frozen=True)
class RopeScaling:
    """Kind of scaling of the positions, and the length that it is for."""

    kind: RopeKind
    max_token_num: int


def scale_rope(config: PretrainedConfig, scaling: RopeScaling) -> str:
    """Write the scaling into a configuration, in place, if the length asks for it.

    The factor is the length over the longest one of the model, rounded up.

    Returns:
        A line to print.
    """
    text = config.get_text_config(decoder=True)
    old = getattr(text, "max_position_embeddings", None)
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or not old:
        raise UserError(
            f"`rope_scaling` {scaling.kind}: {config.model_type} has no rotary positions "
            "(rope_parameters). Drop it, and keep `max_token_num` within the model's length."
        )
    if scaling.max_token_num <= old:
        return spelled(
            f"`rope_scaling` {scaling.kind} does nothing: `max_token_num` "
            f"{scaling.max_token_num} is within the {old} positions of the model"
        )
    factor = math.ceil(scaling.max_token_num / old)
    if all(isinstance(one, dict) for one in parameters.values()):  # one for each kind of layer
        text.rope_parameters = {
            kind: one if kind.startswith(_WINDOWED) else _scaled(one, scaling, factor, old)
            for kind, one in parameters.items()
        }
    else:
        text.rope_parameters = _scaled(parameters, scaling, factor, old)
    note = spelled(f"`rope_scaling` {scaling.kind}: positions are scaled by {factor}")
    if scaling.kind == "dynamic":
        # transformers begins to scale beyond max_position_embeddings
        return (
            f"{note} beyond {old} tokens. Warning: frequencies depend on the length of each "
            "micro-batch; those of linear, yarn and llama3 do not"
        )
    text.max_position_embeddings = old * factor
    return f"{note}, for up to {old * factor} tokens instead of {old}"


def _scaled(
    parameters: dict[str, object], scaling: RopeScaling, factor: int, old: int
) -> dict[str, object]:
    kind = parameters.get("rope_type", PLAIN)
    if kind not in (PLAIN, "mrope") and not kind == scaling.kind == "dynamic":
        raise UserError(
            f"`rope_scaling` {scaling.kind}: the positions of the model are scaled already "
            f"(rope_type {kind!r}). Drop it and keep `max_token_num` within {old}."
        )
    # other values stay: rope_theta, mrope_section, partial_rotary_factor
    scaled = {**parameters, "rope_type": scaling.kind, "factor": float(factor)}
    if scaling.kind in ("yarn", "llama3"):
        scaled["original_max_position_embeddings"] = old
    if scaling.kind == "llama3":
        scaled |= {"low_freq_factor": LOW_FREQ_FACTOR, "high_freq_factor": HIGH_FREQ_FACTOR}
    return scaled


def forget_lengths(model: nn.Module) -> None:
    """Make dynamic positions follow only the length of each pass.

    Those of transformers follow the longest pass since the last short one, so that a resumed run,
    another number of replicas or an evaluation between two steps would compute another model.
    """
    for module in model.modules():
        if hasattr(module, "max_seq_len_cached") and "dynamic" in str(
            getattr(module, "rope_type", "")
        ):
            module.register_forward_pre_hook(_as_begun)


def _as_begun(rotary: nn.Module, _: object) -> None:
    for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, name, rotary.original_max_seq_len)
    for name in [name for name, _ in rotary.named_buffers(recurse=False) if "original" not in name]:
        begun = getattr(rotary, name.replace("inv_freq", "original_inv_freq"))
        rotary.register_buffer(name, begun.to(getattr(rotary, name).device), persistent=False)


LANGUAGE = ("llm", "lm_head")


@dataclass(frozen=True)
class Methods:
    """Methods of training that are asked for; none by default.

    Attributes:
        freeze: which layers of the language model train.
        rope_scaling: positions for longer texts.
        norms_fp32: norms of a half model are kept and computed in float32.
        upcast_lm_head: the head of a half model computes logits in float32.
        quantization: of the frozen linear layers below LoRA.
    """

    freeze: FreezeRule | None = None
    rope_scaling: RopeScaling | None = None
    norms_fp32: bool = False
    upcast_lm_head: bool = False
    quantization: Quantization | None = None

    @classmethod
    def of(cls, given: "Methods | Mapping[str, Any] | None") -> "Methods":
        """Make methods of plain values; those with fields of their own take a mapping."""
        if isinstance(given, Methods):
            return given
        values = dict(given or {})
        kinds = {"freeze": FreezeRule, "rope_scaling": RopeScaling, "quantization": Quantization}
        for name, kind in kinds.items():
            if isinstance(values.get(name), Mapping):
                values[name] = kind(**values[name])
        return cls(**values)

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be done in another way."""
        return self != Methods()

    def prepare(self, config: PretrainedConfig) -> tuple[tuple[str, ...], bool]:
        """Change a configuration; return (notes, whether it is another now) for `finish`."""
        if self.rope_scaling is None:
            return (), False
        text = config.get_text_config(decoder=True)
        before = getattr(text, "rope_parameters", None)
        return (scale_rope(config, self.rope_scaling),), text.rope_parameters != before

    def quantise(self, model: Any, *, device: torch.device | str) -> None:
        """Quantise the layers of a filled stage, and bring the rest of it to the device."""
        if self.quantization is None:
            return
        layers = [layer for _, layer in model.layer_list() if not isinstance(layer, PassThrough)]
        before = base_bytes(layers)
        count = quantise_layers(layers, self.quantization, dtype=model.dtype, device=device)
        if layers and not count:
            raise UserError(
                f"`quantization` {self.quantization.kind}: {model.config.model_type} has no plain "
                "linear layer or experts in its layers. Drop it."
            )
        after = base_bytes(layers)
        model.notes += (
            f"stage {model.stage}: {count} layers are kept as {self.quantization.kind}, "
            f"{after / 2**20:.3g} MiB instead of {before / 2**20:.3g}",
        )
        # modules that are not quantised move too; tied weights stay tied
        for module in model.modules():
            if not getattr(module, "is_quantised", False):
                module._apply(lambda tensor: tensor.to(device), recurse=False)
                for name, value in vars(module).items():
                    # zeros in the place of others' weights take no memory where they are
                    if isinstance(value, torch.Tensor) and not hasattr(value, DONE):
                        module.__dict__[name] = value.to(device)

    def finish(self, model: Any, facts: tuple[tuple[str, ...], bool]) -> None:
        """Change the dtypes that a filled stage computes in, and give it the facts of `prepare`."""
        notes, model.changes_config = facts
        model.notes += notes if model.stage == 0 else ()
        if self.norms_fp32:
            norms_to_float32(model)
        if self.upcast_lm_head and model.is_last and model.whole is not None:
            head_in_float32(model.whole.get_output_embeddings())

    def trained_names(self, model: Any) -> frozenset[str] | None:
        """Parameters of language model and head that train, of all stages; None: no rule."""
        if self.freeze is None:
            return None
        names = [name for name in model.parameter_order if model.part_of(name) in LANGUAGE]
        embedding, head = (*model.vocabulary, "", "")[:2]
        return self.freeze.names(
            names,
            layers=model.layer_name(0).rpartition(".")[0],
            total=model.num_layers(),
            embedding=embedding,
            head=head,
        )


# Modules that are trained whole next to LoRA: `modules_to_save` of `peft`, given by name.
# A weight that two modules share (embedding and tied head) is trained under both names.


def find_whole_modules(whole: nn.Module, wanted: Iterable[str]) -> frozenset[str]:
    """Full paths in the unsplit model of what names mean: last names, endings or expressions."""
    paths = {name for name, _ in whole.named_modules() if name}
    filled = {name for name in paths if any(True for _ in whole.get_submodule(name).parameters())}
    chosen: set[str] = set()
    for one in wanted:
        found = {name for name in filled if is_target(name, [one])}
        if not found:
            endings = sorted({name.rpartition(".")[2] for name in filled})
            names = [name for name in endings if not name.isdecimal()][:MAX_NAMES_SHOWN]
            raise UserError(
                f"`modules_to_save` {one} is not a module with weights of {type(whole).__name__}. "
                f"Name one of {', '.join(names)}."
            )
        chosen |= found
    named = list(whole.named_parameters(remove_duplicate=False))
    shared = {id(parameter) for name, parameter in named if is_inside(name, chosen)}
    tied = {name.rpartition(".")[0] for name, parameter in named if id(parameter) in shared}
    return frozenset(chosen | {path for path in tied if not is_inside(f"{path}.", chosen)})


def is_inside(parameter: str, modules: Iterable[str]) -> bool:
    """Whether a parameter belongs to one of the modules."""
    plain = strip_lora(parameter)
    return any(plain.startswith(module + ".") for module in modules)
