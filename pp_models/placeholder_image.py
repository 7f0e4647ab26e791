"""What the first stage does for a micro-batch without any image: its tower sees a small picture.

Where tower or projector are trained, or the tower's weights are shared out over replicas on their
own, all replicas are to do the same work in each micro-batch: those without a picture, too. What is
chosen here:

- The tower runs forward on the smallest picture that it takes, without a graph, and what it says is
  thrown away. So nothing is multiplied by zero: inf or nan in it reach no hidden state, loss or
  gradient.
- Its weights get nothing from this micro-batch, as in plain transformers: a gradient of zeros would
  let AdamW decay and move them in a step without any picture. Where another replica has a picture,
  zeros are filled in when gradients are added up, sharded or not.
- There is no backward pass through the tower. It would hold no collective: with --dp-shard the
  weights stay put together until the step ends, and gradients are reduced then.
- A frozen tower whose weights are not sent on their own has nothing to do. --dp-shard sends them
  with all else that is no decoder layer, when the forward pass of the stage begins, picture or
  not: the gathers match without it. The same holds without gradients, in evaluation.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel

from stageline.modules.random_state import RandomState
from stageline.stages.example_batch import example_pictures


def run_placeholder(
    whole: PreTrainedModel,
    tower: nn.Module,
    weights: Sequence[nn.Parameter],
    *,
    see: Callable[..., object],
) -> None:
    """Runs the tower on a placeholder, where replicas with a picture run theirs.

    Random numbers are drawn as if it had not run.

    Args:
        weights: of tower and projector.
        see: runs both on its inputs.
    """
    is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    if not is_trained and not _is_sent_on_its_own(tower):
        return
    device = next(tower.parameters()).device
    inputs = placeholder_inputs(whole.config, dtype=whole.dtype, device=device)
    if inputs is not None:
        with torch.no_grad(), RandomState(device).replayed():
            see(**inputs)


def placeholder_inputs(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """The inputs of tower and projector for one small picture; None: not known for this model."""
    return example_pictures(config, dtype=dtype, device=device)


def _is_sent_on_its_own(tower: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in tower.modules())
