"""The load-balancing loss of mixture-of-experts decoders, exact although no stage sees all routers.

transformers takes its averages over the real tokens of all layers at once, so the loss of a model
is not the mean of its layers' losses. Its ingredients are sums, though: they travel beside the
hidden states as one small float32 tensor, each stage adds its own layers, and the last one
computes the loss. The gradient of the probabilities comes back through the same tensor.

Shapes: E experts, K experts per token, N = B x T rows of a micro-batch.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from stageline.errors import UserError

FLAG = "output_router_logits"
LIBRARY_NAME = "load_balancing_loss_func"
LIBRARY_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class RouterLoss:
    """What the loss of one architecture needs.

    Statistics are a vector [2E + 1] in float32: how often each expert was chosen, the sum of each
    expert's probabilities, and the number of rows, all over the layers so far. Counts stay exact
    up to 2^24 per expert and micro-batch.

    Attributes:
        num_experts: E.
        top_k: K.
        coefficient: what the loss is multiplied by.
    """

    num_experts: int
    top_k: int
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
        """Adds the layers of one stage, in their order; sums and casts are the library's.

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
            is_real = _is_real(attention_mask_BT, logits_NE)
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


def _is_real(attention_mask_BT: torch.Tensor | None, logits_NE: torch.Tensor) -> torch.Tensor:
    """1.0 for rows that count, 0.0 for padding, [N]."""
    if attention_mask_BT is None:
        return torch.ones(logits_NE.shape[0], device=logits_NE.device)
    return attention_mask_BT.reshape(-1).to(device=logits_NE.device, dtype=torch.float32)


def find_router_loss(whole: PreTrainedModel, *, coefficient: float | None = None) -> RouterLoss:
    """The router loss of a whole model, read from the model and checked against its own function.

    Args:
        coefficient: replaces the one of the configuration.

    Raises:
        UserError: the model has no such loss, or one of another form.
    """
    library = getattr(sys.modules[type(whole).__module__], LIBRARY_NAME, None)
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    values = [getattr(whole, name, None) for name in names]
    is_text_model = whole.config.get_text_config(decoder=True) is whole.config
    if library is None or None in values or not is_text_model or not _router_types(whole):
        raise UserError(
            f"{FLAG} is true for {type(whole).__name__} ({whole.config.model_type}), a text "
            f"decoder with experts and transformers' {LIBRARY_NAME} was expected: other models "
            f"have no router loss, or one that stages cannot carry yet. Set {FLAG} to false."
        )
    num_experts, top_k, default = values
    if not _agrees(RouterLoss(num_experts, top_k, coefficient=1.0), library):
        raise UserError(
            f"{LIBRARY_NAME} of {whole.config.model_type} gives another number than E x sum of "
            f"f_e x P_e over all layers, which is what stages can carry: set {FLAG} to false."
        )
    return RouterLoss(num_experts, top_k, default if coefficient is None else coefficient)


def has_routers(whole: PreTrainedModel) -> bool:
    """Whether the model, or what is left of it after pruning, holds a layer with experts."""
    return any(isinstance(module, _router_types(whole)) for module in whole.modules())


def _router_types(whole: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """The classes whose outputs the library records as router logits."""
    recorders = (whole.base_model._can_record_outputs or {}).get("router_logits", [])
    recorders = recorders if isinstance(recorders, list) else [recorders]
    classes = [getattr(recorder, "target_class", recorder) for recorder in recorders]
    return tuple(item for item in classes if isinstance(item, type))


def _agrees(router_loss: RouterLoss, library: Callable[..., torch.Tensor]) -> bool:
    """Tries both on two small layers: a new version of the library may change its formula."""
    if list(inspect.signature(library).parameters) != LIBRARY_ARGUMENTS:
        return False
    device = torch.device("cpu")  # whatever the default is
    generator = torch.Generator(device).manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], device=device)
    shape = (mask.numel(), router_loss.num_experts)
    layers = tuple(torch.randn(shape, generator=generator, device=device) for _ in range(2))
    theirs = library(layers, router_loss.num_experts, router_loss.top_k, mask)
    ours = router_loss.loss(router_loss.add(None, layers, mask, device=device))
    return torch.allclose(ours, theirs, rtol=1e-5)
