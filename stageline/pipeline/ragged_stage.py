"""A `PipelineStage` whose micro-batches each have a shape of their own, known in advance.

torch allocates one set of buffers from the first micro-batch, asks shapes over the network and
may run the model on uninitialised memory to learn them. Here every rank computes all shapes from
the batch it holds, so that no rank asks and buffers live only as long as they are needed. The
methods overridden are the ones torch's schedules call; tests/unit/test_torch_names.py pins them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

TensorMetas = tuple[torch.Tensor, ...]  # on the meta device: shape and dtype only


class RaggedStage(PipelineStage):
    """Sends and receives tensors of the shapes given to `prepare`.

    Attributes:
        sends_grad: whether a gradient goes back to the stage before: something trains there.
        receives_grad: whether one comes back from the stage behind: something trains here or
            before.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        stage: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(module, stage, num_stages, device, group=group)
        self.sends_grad = stage > 0
        self.receives_grad = stage < num_stages - 1
        self._input_metas: Sequence[TensorMetas] = ()
        self._output_metas: Sequence[TensorMetas] = ()
        self._activations: dict[int, TensorMetas] = {}
        self._grads: dict[int, TensorMetas] = {}

    def prepare(
        self,
        input_metas: Sequence[TensorMetas],
        output_metas: Sequence[TensorMetas],
        *,
        has_backward: bool,
    ) -> None:
        """Announces the shapes of the coming step and forgets the last one.

        Args:
            input_metas: what this stage receives, one entry per micro-batch.
            output_metas: what it sends on; empty tuples on the last stage.
        """
        self.clear_runtime_states()
        self.bwd_cache.clear()
        self._activations.clear()
        self._grads.clear()
        self._input_metas = input_metas
        self._output_metas = output_metas
        self.has_backward = has_backward
        self.chunks = len(input_metas)
        if hasattr(self, "_stage_meta"):  # torch >= 2.13 counts the inputs of a stage by it
            self._stage_meta.inputs = input_metas[0]

    # -- communication: called by torch's schedules ----------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        buffers = tuple(
            torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            for meta in self._input_metas[fwd_chunk_id]
        )
        self._activations[fwd_chunk_id] = buffers
        return [self._op(dist.irecv, buffer, self.stage_index - 1) for buffer in buffers]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        self._check_outputs(outputs, fwd_chunk_id)
        return [self._op(dist.isend, output, self.stage_index + 1) for output in outputs]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward or not self.receives_grad:
            return []
        buffers = tuple(
            torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            for meta in self._output_metas[bwd_chunk_id]
        )
        self._grads[bwd_chunk_id] = buffers
        return [self._op(dist.irecv, buffer, self.stage_index + 1) for buffer in buffers]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        grads = self.bwd_cache.pop(bwd_chunk_id, ())
        if self.is_first or not self.has_backward or not self.sends_grad:
            return []
        # an input that had no effect on the loss has no gradient, yet the peer waits for one
        tensors = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=self.device) if grad is None else grad
            for grad, meta in zip(grads, self._input_metas[bwd_chunk_id], strict=True)
        ]
        return [self._op(dist.isend, tensor, self.stage_index - 1) for tensor in tensors]

    def _op(self, operation: object, tensor: torch.Tensor, stage: int) -> dist.P2POp:
        peer = self.stage_index_to_group_rank[stage]
        if self.group is not None:
            peer = dist.get_global_rank(self.group, peer)
        return dist.P2POp(operation, tensor.detach().contiguous(), peer, self.group)

    def _check_outputs(self, outputs: TensorMetas, chunk: int) -> None:
        """A wrong shape would be read as garbage, or hang the peer: two comparisons prevent it."""
        expected = [(tuple(meta.shape), meta.dtype) for meta in self._output_metas[chunk]]
        came = [(tuple(output.shape), output.dtype) for output in outputs]
        if came != expected:
            raise RuntimeError(
                f"stage {self.stage_index} made {came} of micro-batch {chunk}, stage "
                f"{self.stage_index + 1} expects {expected}: get_example_input of the stage model "
                "must give the true shape and dtype of what the stage before returns."
            )

    # -- computation -----------------------------------------------------------------------

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> TensorMetas:
        activations = self._activations.pop(fwd_chunk_id)
        if self.has_backward and self.sends_grad:
            for activation in activations:
                activation.requires_grad_(activation.is_floating_point())
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> TensorMetas:
        return self._grads.pop(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: object, **kwargs: object) -> None:
        if self.has_backward and not self.is_last and not self.receives_grad:
            self.fwd_cache.pop(bwd_chunk_id)  # nothing trains up to here
            return
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
