"""An entry file whose two stages answer until the second one is killed in the middle."""

import os
import signal
import sys

import torch

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.distributed.failure import run_entry
from stageline.distributed.failure_record import name_stages
from stageline.distributed.launch import launch_if_needed
from stageline.distributed.process_group import distributed_context
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.request import Request, Sampling
from stageline.inference.decoding.stage_decoder import StageDecoder
from tests.helpers.decoding_engines import on_ranks
from tests.helpers.tiny_models import tiny_tokenizer

ENDS_AT = 9  # the order that the second stage does not live to see


class Mortal(StageDecoder):
    """A stage that is killed."""

    def run(self, order, tensors):
        if order.number >= ENDS_AT and self.stage.stage == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(order, tensors)


def serve(engine: DecodingEngine) -> None:
    """Serve requests like a server, without end."""
    ids = torch.arange(9, 20)[None]
    for key in "abc":
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        engine.submit(Request(key, prompt, Sampling(10**6, stop_token_ids=())), lambda event: None)
    engine.run()


def main() -> None:
    launch_if_needed(2)
    with distributed_context(num_ranks=2, device="cpu", timeout=600) as context:
        name_stages([context.pp_rank])
        stage = train_model_register["llama"](
            config_path=None,
            processor_path=None,
            checkpoint_path=sys.argv[1],
            stage=context.pp_rank,
            num_stages=2,
        )[0]
        on_ranks(stage, tiny_tokenizer(), serve, decoder_class=Mortal, num_groups=1)


if __name__ == "__main__":
    run_entry(main)
