"""torch.compile layer by layer: one small graph that all equal layers share."""

from collections.abc import Iterable

import torch
from torch import nn

from stageline.modules.pass_through import PassThrough


def compile_layers(layers: Iterable[tuple[int, nn.Module]], *, backend: str = "inductor") -> None:
    """Compiles the forward of each layer. In place: no name of a parameter changes.

    Shapes are dynamic, since each micro-batch has a length of its own. A compiled layer is one
    node of the autograd graph: its gradients can't be split into those of inputs and of weights.

    Args:
        layers: (index in the whole model, layer); layers of other stages are passed over.
        backend: of torch.compile.
    """
    for _, layer in layers:
        if not isinstance(layer, PassThrough):
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
