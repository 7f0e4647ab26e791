"""An entry file whose two stages answer until the second one ends as its first argument says."""

import os
import signal
import sys
import threading
from pathlib import Path

import torch

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.distributed.failure import name_stages, run_entry
from stageline.distributed.launch import launch_if_needed
from stageline.distributed.process_group import distributed_context
from stageline.inference.decoding.request import Failed, Request, Sampling
from stageline.testing.decoding_engines import on_ranks
from stageline.testing.tiny_tokenizers import tiny_tokenizer

ENDS_AT = 9  # the order in which it does


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    raise KeyError("boom outside of a pass")


def spoil(decoder, end) -> None:
    run, calls = decoder.run, iter(range(10**9))

    def counted(*args):
        if next(calls) == ENDS_AT:
            end()
        return run(*args)

    decoder.run = counted


def work(engine, folder: Path) -> None:
    def listen(event) -> None:
        if isinstance(event, Failed):
            (folder / f"failed_{event.key}").write_text(str(event.error))

    ids = torch.arange(9, 20)[None]
    for key in "abc":
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        engine.submit(Request(key, prompt, Sampling(10**6, stop_token_ids=())), listen)
    threading.Timer(1.0, lambda: None).start()  # as a server has other threads
    engine.run()


def main() -> None:
    mode, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    launch_if_needed(2)
    with distributed_context(num_ranks=2, device="cpu", timeout=600) as context:
        name_stages([context.pp_rank])
        stage = train_model_register["llama"](
            config_path=None,
            processor_path=None,
            checkpoint_path=model,
            stage=context.pp_rank,
            num_stages=2,
        )[0]
        if context.pp_rank == 1:
            import stageline.testing.decoding_engines as engines

            made = engines.StageDecoder

            def make(stage):
                decoder = made(stage)
                spoil(decoder, globals()[mode])
                return decoder

            engines.StageDecoder = make
        on_ranks(stage, tiny_tokenizer(), lambda engine: work(engine, folder), num_groups=1)


if __name__ == "__main__":
    run_entry(main)
