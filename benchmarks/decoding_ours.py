"""Our engine as one of the ways of benchmarks/decoding.py: one stage, several settings."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from pp_models import CausalLMStage
from stageline.inference.decoding.chain import RankChain, follow, make_wire
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.request import Failed, Request, Sampling
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder

CPU = torch.device("cpu")


class OurStage:
    """This process's stage, shared by the engines of all settings."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, rank: int, cut: int) -> None:
        self.rank, self.folder = rank, folder
        num_layers = 30
        stage, _, _ = CausalLMStage.build(
            config_path=None,
            processor_path=None,
            checkpoint_path=str(folder),
            stage=rank,
            num_stages=2,
            dtype=dtype,
            partition=[cut, num_layers - cut],
        )
        self.decoder = StageDecoder(stage)
        self.wire = make_wire(rank, num_stages=2, device=CPU)

    def way(self, num_groups: int | None, *, cuts: bool = True) -> "Ours":
        """The engine with so many groups; None: with those that it chooses.

        Args:
            cuts: long prompts are read in pieces.
        """
        return Ours(self, num_groups, cuts=cuts)


class Ours:
    """Pipelined decoding."""

    def __init__(self, stage: OurStage, num_groups: int | None, *, cuts: bool) -> None:
        self.stage = stage
        if stage.rank > 0:
            return
        limits = Limits(max_rows=64, num_groups=num_groups)
        chain = RankChain(stage.decoder, stage.wire, num_stages=2)
        tokenizer = AutoTokenizer.from_pretrained(stage.folder)
        self.engine = DecodingEngine(
            chain, tokenizer=tokenizer, limits=limits, reads_in_pieces=cuts
        )

    def __call__(self, ids_BT: Tensor, num_tokens: int) -> dict[int, list[int]]:
        answers = {}
        if self.stage.rank == 0:
            sampling = Sampling(max_new_tokens=num_tokens, stop_token_ids=())
            mask_1T = torch.ones(1, ids_BT.shape[1], dtype=torch.long)
            requests = (
                Request(str(row), {"input_ids": ids_1T, "attention_mask": mask_1T}, sampling)
                for row, ids_1T in enumerate(ids_BT.split(1))
            )
            for event in self.engine.answer(requests):
                if isinstance(event, Failed):
                    raise event.error
                answers[int(event.key)] = list(event.token_ids)
        self._end()
        return answers

    def _end(self) -> None:
        if self.stage.rank == 0:
            self.engine.close()
        else:
            follow(self.stage.decoder, self.stage.wire, num_stages=2)
