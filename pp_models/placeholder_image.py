"""What the first stage does for a micro-batch without any image: its tower sees a small picture.

Where the tower is trained, or its weights are shared out over replicas, all replicas are to do the
same work in each micro-batch: those without a picture, too. What is chosen here:

- The tower runs forward on the smallest picture that it takes, and what it says is thrown away. So
  nothing is multiplied by zero: inf or nan in it reach neither the hidden states nor a gradient.
- Each trained weight that had a part in it, of tower and projector, gets a gradient of exact zeros
  through one function in the graph of this micro-batch. So hooks on gradients run, and a weight has
  a gradient on all replicas or on none; one that the model never uses (the last layer of LLaVA's
  tower) keeps None, as with a picture, and no optimizer touches it.
- There is no backward pass through the tower. It would hold no collective: with --dp-shard the
  weights stay put together until the step ends, and gradients are reduced then.
- A frozen tower whose weights are not sent on their own has nothing to do. --dp-shard sends them
  with all else that is no decoder layer, when the forward pass of the stage begins, picture or
  not: the gathers match without it. The same holds without gradients, in evaluation.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel

from stageline.modules.random_state import RandomState

FEATURES = ("pooler_output", "deepstack_features")  # of what get_image_features gives


def run_placeholder(
    whole: PreTrainedModel, tower: nn.Module, weights: Sequence[nn.Parameter]
) -> list[nn.Parameter]:
    """Runs the tower on a placeholder, where replicas with a picture run theirs.

    Random numbers are drawn as if it had not run.

    Args:
        weights: of tower and projector.

    Returns:
        Those of them that are trained and had a part in it: they want a gradient of zeros.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    computes_grad = torch.is_grad_enabled() and bool(trained)
    if not computes_grad and not _is_sent_on_its_own(tower):
        return []
    device = next(tower.parameters()).device
    inputs = placeholder_inputs(whole.config, dtype=whole.dtype, device=device)
    if inputs is None:
        return []
    with torch.set_grad_enabled(computes_grad), RandomState(device).replayed():
        output = whole.base_model.get_image_features(**inputs, return_dict=True)
    used = _leaves(_tensors([output.get(name) for name in FEATURES]))
    return [weight for weight in trained if weight in used]


def placeholder_inputs(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """The inputs of `get_image_features` for one small picture; None: not known for this model."""
    vision = config.vision_config
    merge = getattr(vision, "spatial_merge_size", None)
    if merge is not None and hasattr(vision, "temporal_patch_size"):
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        numbers = channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(merge**2, numbers, dtype=dtype, device=device),
            "image_grid_thw": torch.tensor([[1, merge, merge]], device=device),
        }
    if hasattr(config, "scale_factor"):
        side = vision.patch_size * config.scale_factor
        # ones: Idefics3 takes pictures of zeros for padding, and drops them
        pixels = torch.ones(1, 1, _channels(vision), side, side, dtype=dtype, device=device)
        mask = torch.ones(1, 1, side, side, dtype=torch.bool, device=device)
        return {"pixel_values": pixels, "pixel_attention_mask": mask}
    if getattr(vision, "image_size", None) is None:
        return None
    height, width = _size(vision.image_size)
    pixels = torch.zeros(1, _channels(vision), height, width, dtype=dtype, device=device)
    if hasattr(config, "image_grid_pinpoints"):
        tiles = [1 + (h // height) * (w // width) for h, w in config.image_grid_pinpoints]
        return {
            # more tiles than are taken do no harm
            "pixel_values": pixels.expand(max(tiles), -1, -1, -1)[None],
            "image_sizes": torch.tensor([[height, width]], device=device),
        }
    return {"pixel_values": pixels}


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value or () for tensor in _tensors(item)]


def _leaves(outputs: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    """The leaves of the graph that these tensors came from."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, leaves = set(waiting), set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        behind = {following for following, _ in node.next_functions if following} - seen
        seen |= behind
        waiting.extend(behind)
    return leaves


class _WithoutEffect(torch.autograd.Function):
    """Passes a tensor on; weights beside it get a gradient of zeros."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.kinds = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # one zero for each weight, in all of its places: no memory before it is added
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in ctx.kinds
        ]
        return grad, *zeros


def with_zero_gradients(tensor: torch.Tensor, weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """`tensor`, whose backward pass also gives each of `weights` a gradient of zeros."""
    return _WithoutEffect.apply(tensor, *weights) if weights else tensor


def _is_sent_on_its_own(tower: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in tower.modules())


def _channels(vision: PretrainedConfig) -> int:
    return getattr(vision, "num_channels", 3)


def _size(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
