"""Masks, positions and the router loss of a stage, for packed and for padded rows.

A transformers decoder that gets no attention mask reads the borders of samples off the position
ids, which restart there, and builds the mask of its attention kernel itself: whole rows for sdpa
and eager, cumulative lengths for flash attention (rows of one micro-batch: one). So only small
integers are in the micro-batch, and no mask crosses a border.

Shapes: B rows, T tokens, S samples of all rows, L tokens of the longest sample.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel, masking_utils

from stageline.contracts import IGNORE, ROW_LENGTHS
from stageline.errors import UserError
from stageline.modules.router_records import ROUTER_LOGITS

Batch = dict[str, torch.Tensor]


def is_packed(batch: Batch) -> bool:
    """Whether rows hold several samples."""
    return "sample_ids" in batch


# -- facts about rows that the host has, so that transformers need not ask the device for them
# In a row that is padded on the right, a token sees none of the padding under a causal mask. With
# no mask sdpa and flash attention take their causal kernels; outputs at padding are then other
# numbers, which no loss reads. Other uses of the model's `attention_mask` (positions, alibi, Mamba
# states, the loss of routers) stay.

_KERNELS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def row_lengths(batch: Mapping[str, torch.Tensor]) -> Batch:
    """Real tokens of each row [B], where all rows are padded on the right; else nothing.

    Nothing is said of packed rows, nor where a loss would read what padding comes to.
    """
    mask_BT, labels_BT = batch["attention_mask"], batch.get("labels")
    if "sample_ids" in batch or mask_BT.ndim != 2:
        return {}
    lengths_B = mask_BT.sum(dim=1)
    place_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    is_plain = torch.equal(mask_BT, (place_T < lengths_B[:, None]).to(mask_BT)) and lengths_B.all()
    learns = labels_BT is not None and bool((labels_BT[mask_BT == 0] != IGNORE).any())
    return {ROW_LENGTHS: lengths_B} if is_plain and not learns else {}


@dataclass
class _Rows:
    """The known facts about the rows of a pass.

    Attributes:
        mask_BT: of rows that are padded on the right, as the model gets it.
        looks: transformers may ask the device whether a mask can be left out.
        seen: masks that transformers made of just this mask.
    """

    mask_BT: torch.Tensor | None = None
    is_packed: bool = False
    looks: bool = True
    seen: list[torch.Tensor] = field(default_factory=list)


_ROWS: ContextVar[_Rows | None] = ContextVar("what is known of the rows of a pass", default=None)


@contextlib.contextmanager
def known_rows(batch: Batch, *, looks: bool = True) -> Iterator[None]:
    """While open, transformers' mask functions use the host's facts and do not ask the device."""
    padded = batch.get("attention_mask") if ROW_LENGTHS in batch else None
    token = _ROWS.set(_Rows(padded, is_packed(batch), looks))
    try:
        yield
    finally:
        _ROWS.reset(token)


def _mask_arguments(plain: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
    """Record what transformers makes of the micro-batch's own mask; a model may bring another."""
    found = plain(*args, **kwargs)
    rows = _ROWS.get()
    given = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)
    if rows is not None and given is not None and given is rows.mask_BT:
        rows.seen.append(found[1])
    return found


def _mask_of_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return a kernel's mask, without padding if it hides only the future besides."""
    rows, mask = _ROWS.get(), kwargs.get("attention_mask")
    if rows is not None and mask is not None:
        # a decoding step needs its mask where rows begin after others: skip the device's check
        is_step = kwargs.get("q_length") == 1 < (kwargs.get("kv_length") or 0)
        is_square = kwargs.get("q_length") == kwargs.get("kv_length") == mask.shape[1]
        # transformers allows the skip only for a causal mask, with or without a window
        asks = kwargs.get("allow_is_causal_skip")
        if asks and is_square and any(mask is one for one in rows.seen):
            kwargs["attention_mask"] = None
        elif is_step or not rows.looks:
            kwargs["allow_is_causal_skip"] = False
    kernels: Any = masking_utils.AttentionMaskInterface._global_mapping
    return kernels[name](*args, **kwargs)


def _packed_borders(plain: Callable[..., Any], position_ids: torch.Tensor) -> Any:
    """The sample of each token; for packed rows without a check that there is more than one."""
    rows = _ROWS.get()
    if rows is None or not rows.is_packed:
        return plain(position_ids)
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def _tell_library() -> None:
    """Wrap mask functions of transformers; outside of `known_rows` the wrappers change nothing."""
    inner = {"_preprocess_mask_arguments": _mask_arguments}
    inner |= {"find_packed_sequence_indices": _packed_borders}
    if not all(hasattr(masking_utils, name) for name in inner):
        return  # another release: it asks the device, and all is as right as before
    for name, ours in inner.items():
        setattr(masking_utils, name, functools.partial(ours, getattr(masking_utils, name)))
    kernels = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    for name in _KERNELS:
        if name in kernels:
            kernels[name] = functools.partial(_mask_of_kernel, name)


_tell_library()


def host_positions(base: nn.Module, batch: Batch) -> Batch:
    """Positions [axes, B, T] that follow from pictures' sizes, as the model's forward makes them.

    Made on the host, by the very function that the forward calls where it gets none: on a device
    that would wait some ten times for each picture. Nothing where positions are those of text.
    """
    if not hasattr(base, "get_rope_index"):
        return {}
    shell: Any = object.__new__(type(base))
    shell.__dict__.update(base.__dict__, rope_deltas=None)  # it notes those of each call
    if is_packed(batch):
        return {"position_ids": multimodal_positions(batch, shell.get_rope_index)}
    ask = getattr(shell, "compute_3d_position_ids", None)
    names = inspect.signature(ask).parameters if ask is not None else {}
    if ask is None or ("mm_token_type_ids" in names and "mm_token_type_ids" not in batch):
        return {}
    found = ask(**{name: batch.get(name) for name in names})
    return {} if found is None else {"position_ids": found}


def axes_positions(
    get_rope_index: Callable[..., tuple[torch.Tensor, torch.Tensor]], **inputs: torch.Tensor
) -> torch.Tensor:
    """Positions [3, B, T] of a model's own function; not all ask for the kinds of tokens."""
    takes = inspect.signature(get_rope_index).parameters
    return get_rope_index(**{name: value for name, value in inputs.items() if name in takes})[0]


def multimodal_positions(
    batch: Batch, get_rope_index: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Position ids [4, B, T]: of the text, which show the borders, then time, height, width."""
    samples_BT, text_BT = batch["sample_ids"], batch["position_ids"]
    axes_3BT = torch.zeros(3, *text_BT.shape, dtype=text_BT.dtype, device=text_BT.device)
    is_real_BT = samples_BT >= 0
    if bool(is_real_BT.any()):
        row_N = is_real_BT.nonzero()[:, 0]
        _, sample_N = torch.stack((row_N, samples_BT[is_real_BT])).unique(
            dim=1, return_inverse=True
        )
        place_N = text_BT[is_real_BT]
        shape_SL = (int(sample_N.max()) + 1, int(place_N.max()) + 1)

        def unpack(values_BT: torch.Tensor) -> torch.Tensor:
            values_SL = values_BT.new_zeros(shape_SL)
            values_SL[sample_N, place_N] = values_BT[is_real_BT]
            return values_SL

        grids = {name: batch[name] for name in ("image_grid_thw",) if name in batch}
        alone_3SL = axes_positions(
            get_rope_index,  # it is asked about the samples as rows of their own
            input_ids=unpack(batch["input_ids"]),
            mm_token_type_ids=unpack(batch.get("mm_token_type_ids", torch.zeros_like(text_BT))),
            attention_mask=unpack(torch.ones_like(samples_BT)),
            **grids,
        )
        axes_3BT[:, is_real_BT] = alone_3SL[:, sample_N, place_N].to(axes_3BT)
    return torch.cat((text_BT[None], axes_3BT))


# -- the load-balancing loss of mixture-of-experts decoders, exact on any number of stages
# transformers takes its averages over the real tokens of all layers at once, so the loss of a model
# is not the mean of its layers' losses. Its ingredients are sums; one small float32 tensor takes
# them along with the hidden states, and the last stage computes the loss.
#
# Shapes: E experts, K experts per token, N = B x T rows of a micro-batch.

FLAG = "output_router_logits"
LIBRARY_NAME = "load_balancing_loss_func"
LIBRARY_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class RouterLoss:
    """Settings of one architecture's load-balancing loss.

    Statistics are a vector [2E + 1] in float32: how often each expert was chosen, the sum of each
    expert's probabilities, and the number of rows, all over the layers so far. Counts stay exact
    up to 2^24 per expert and micro-batch.

    """

    num_experts: int  # E
    top_k: int  # K
    coefficient: float

    def example(self) -> torch.Tensor:
        """Shape and dtype of the statistics, on the meta device."""
        return torch.empty(2 * self.num_experts + 1, dtype=torch.float32, device="meta")

    def add(
        self,
        statistics: torch.Tensor | None,
        router_logits: Sequence[torch.Tensor],
        attention_mask_BT: torch.Tensor | None,
        *,
        device: torch.device,
    ) -> torch.Tensor:
        """Add the layers of one stage, in their order, with the sums and casts of transformers.

        Args:
            statistics: of the stage before; None on the first one.
            router_logits: [N, E] of each layer with experts; may be empty.
            attention_mask_BT: 0 for padding, which does not count; None: no padding.
        """
        if statistics is None:
            statistics = torch.zeros(2 * self.num_experts + 1, device=device)
        counts, probabilities, num_rows = self._parts(statistics)
        for logits_NE in router_logits:
            weights_NE = functional.softmax(logits_NE, dim=-1)
            chosen_NK = torch.topk(weights_NE, self.top_k, dim=-1).indices
            if attention_mask_BT is None:
                is_real = torch.ones(logits_NE.shape[0], device=logits_NE.device)
            else:
                is_real = attention_mask_BT.reshape(-1).to(logits_NE.device, torch.float32)
            counts = counts + torch.zeros_like(counts).scatter_add_(
                0, chosen_NK.reshape(-1), is_real.repeat_interleave(self.top_k)
            )
            probabilities = probabilities + (weights_NE.float() * is_real.unsqueeze(-1)).sum(dim=0)
            num_rows = num_rows + is_real.sum()
        return torch.cat([counts, probabilities, num_rows])

    def loss(self, statistics: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch, a scalar: E x sum over e of f_e x P_e, times coefficient.

        f_e is the share of rows that chose expert e, P_e its mean probability.
        """
        counts, probabilities, num_rows = self._parts(statistics)
        shares = counts / num_rows
        means = probabilities / num_rows
        return (shares * means).sum() * self.num_experts * self.coefficient

    def _parts(self, statistics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts, probabilities, num_rows = statistics.split([self.num_experts, self.num_experts, 1])
        # only probabilities have a gradient; the vector as a whole asks for one
        return counts.detach(), probabilities, num_rows.detach()


def find_router_loss(whole: PreTrainedModel, *, coefficient: float | None = None) -> RouterLoss:
    """The router loss of a whole model, checked against the function of transformers."""
    library = getattr(sys.modules[type(whole).__module__], LIBRARY_NAME, None)
    records = ROUTER_LOGITS in (getattr(whole.base_model, "_can_record_outputs", None) or {})
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    values = [getattr(whole, name, None) for name in names]
    is_text_model = whole.config.get_text_config(decoder=True) is whole.config
    if library is None or None in values or not is_text_model or not records:
        raise UserError(
            f"{FLAG} is true for {type(whole).__name__} ({whole.config.model_type}), which has no "
            f"{LIBRARY_NAME} of a text decoder with experts. Set {FLAG} to false."
        )
    num_experts, top_k, default = (value for value in values if value is not None)
    # compare both on two small layers: a new version of transformers may change its formula
    ours, is_same = RouterLoss(num_experts, top_k, coefficient=1.0), False
    if list(inspect.signature(library).parameters) == LIBRARY_ARGUMENTS:
        device = torch.device("cpu")  # whatever the default is
        generator = torch.Generator(device).manual_seed(0)
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], device=device)
        shape = (mask.numel(), num_experts)
        layers = tuple(torch.randn(shape, generator=generator, device=device) for _ in range(2))
        theirs = library(layers, num_experts, top_k, mask)
        found = ours.loss(ours.add(None, layers, mask, device=device))
        is_same = torch.allclose(found, theirs, rtol=1e-5)
    if not is_same:
        raise UserError(
            f"{LIBRARY_NAME} of {whole.config.model_type} gives another number than E x sum of "
            f"f_e x P_e over all layers. Set {FLAG} to false."
        )
    return RouterLoss(num_experts, top_k, default if coefficient is None else coefficient)


# -- tries, before training, whether a stage keeps packed samples apart. Uses no model's name
# Two samples are in one row. The gradient of the second one's output with respect to the first
# one's input must be exactly zero (and the other way round), and the second must come out as it
# does in a row of its own.
#
# Shapes: B rows, T tokens, H hidden size.

_FEW_IDS = torch.arange(3, 13)
# largest relative difference between packed and separate that rounding explains
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def check_packing(
    model: Any, *, rows: int, device: torch.device | str = "cpu", ids_N: torch.Tensor = _FEW_IDS
) -> None:
    """Refuse a stage in which a packed sample depends on another one.

    Args:
        ids_N: of both samples, which are equally long.
    """
    was_training = model.training
    model.eval()
    try:
        ids_N, length = ids_N.to(device), len(ids_N) // 2
        halves = slice(0, length), slice(length, 2 * length)
        for own, other in (halves, halves[::-1]):
            # once for each: flex attention's compiled kernels refuse a second backward pass
            packed_BTH, source_BTH = _run(model, rows, ids_N)
            weights = torch.arange(1, packed_BTH.shape[-1] + 1, device=packed_BTH.device).cos()
            (grad,) = torch.autograd.grad((packed_BTH[:, own].float() * weights).sum(), source_BTH)
            if bool(_by_token(model, grad, packed_BTH.shape[:2])[:, other].any()):
                seen = f"a token sees tokens of another sample with {rows} rows a micro-batch"
                raise _refusal(model, seen)
        for own in halves:
            alone_BTH, _ = _run(model, rows, ids_N, own)
            packed, alone = packed_BTH[:, own].detach().float(), alone_BTH.float()
            apart = ((packed - alone).norm() / alone.norm()).item()
            if not apart <= _TOLERANCE.get(packed_BTH.dtype, 0.05):
                raise _refusal(
                    model, f"a packed sample comes out differently than alone (by {apart:.1e})"
                )
    except TypeError as error:
        raise _refusal(model, f"its forward does not take position ids ({error})") from error
    finally:
        model.train(was_training)


def _run(
    model: Any, rows: int, ids_N: torch.Tensor, own: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and (embedded) input of rows of both samples, or of the own places of one."""
    batch = {name: value[:, own] for name, value in _batch(model, rows, ids_N).items()}
    with torch.enable_grad():
        if model.is_first:
            with _embedded(model) as found:
                output = model(batch["input_ids"], **batch)
            source = found[0]
        else:
            meta, *_ = model.get_example_input(rows, len(ids_N))
            _, *extras = model.get_example_input(*batch["input_ids"].shape)
            drawn = torch.randn(meta.shape, generator=torch.Generator().manual_seed(0))
            axis = _row_axis(model, drawn, (rows, len(ids_N))) + 1
            drawn = drawn.movedim(axis, 0)[own].movedim(0, axis)
            source = drawn.to(device=ids_N.device, dtype=meta.dtype).requires_grad_()
            zeros = [torch.zeros_like(extra, device=ids_N.device) for extra in extras]
            output = model(source, *zeros, **batch)
    made = output[0] if isinstance(output, tuple) else output
    return _by_token(model, made, batch["input_ids"].shape), source


def _row_axis(model: Any, values: torch.Tensor, shape: Sequence[int]) -> int:
    """The axis of rows, behind which that of tokens is; some models carry several streams."""
    for axis in range(values.ndim):
        if list(values.shape[axis : axis + 2]) == list(shape):
            return axis
    raise _refusal(model, f"it makes {list(values.shape)}, not [rows, tokens, width]")


def _by_token(model: Any, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Values [B, T, ...] of hidden states."""
    axis = _row_axis(model, values, shape)
    return values.movedim((axis, axis + 1), (0, 1)).flatten(2)


def _batch(model: Any, rows: int, ids_N: torch.Tensor) -> Batch:
    place_N = torch.arange(len(ids_N), device=ids_N.device)
    length = len(ids_N) // 2
    batch = {
        "input_ids": ids_N,
        "attention_mask": torch.ones_like(ids_N),
        "position_ids": place_N % length,
        "sample_ids": place_N // length,
    }
    inner = getattr(model, "whole", None)
    if inner is not None and "token_type_ids" in inspect.signature(inner.forward).parameters:
        batch["token_type_ids"] = torch.zeros_like(ids_N)  # text, or a prefix that is read at once
    return {name: value.expand(rows, -1) for name, value in batch.items()}


@contextlib.contextmanager
def _embedded(model: Any) -> Iterator[list[torch.Tensor]]:
    """Catch the output of the first stage's embedding, as a leaf of the graph."""
    found: list[torch.Tensor] = []

    def catch(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        found.append(output.detach().requires_grad_())
        return found[-1].clone()  # some models scale it in place

    inner = model if getattr(model, "whole", None) is None else model.whole
    if not hasattr(inner, "get_input_embeddings"):
        raise _refusal(model, "it has no get_input_embeddings")
    handle = inner.get_input_embeddings().register_forward_hook(catch)
    try:
        yield found
    finally:
        handle.remove()


def _refusal(model: Any, reason: str) -> UserError:
    inner = getattr(model, "whole", None)
    config = getattr(inner, "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    return UserError(
        f"`packing`: stage {model.stage} of {type(inner or model).__name__} (attention {kernel}) "
        f"cannot hold several samples in one row: {reason}. Leave `packing` out, or choose "
        "`train_model.attn_implementation` sdpa."
    )
