"""The line about the stages, and peak memory."""

import os
import resource
from types import SimpleNamespace

import psutil
import torch
import torch.distributed as dist
import transformers

from commands import train_engines
from options.train import RolloutOptions, RunConfig, memory_remedies
from pp_models import CausalLMStage
from stageline import progress
from stageline.streaming.runner import streaming_schedule
from stageline.tables import human_bytes, human_count, human_memory
from stageline.training.memory import MemoryAccount, gather_peaks, peak_memory
from stageline.training.run_log import show_stages
from tests.helpers.fake_devices import fake_accelerators


def test_totals_are_those_of_the_whole_model(capsys):
    """Count the tied weight once, although the first and the last stage hold it."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    whole = transformers.AutoModelForCausalLM.from_config(config)
    stages = [CausalLMStage(config, stage=s, num_stages=3, dtype=torch.float32) for s in range(3)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    show_stages(stages, group=None)
    count = human_count(whole.num_parameters())
    each = [sum(p.nbytes for p in stage.parameters()) for stage in stages]
    assert sum(each) == 4 * (whole.num_parameters() + 64 * 16), "two stages hold the tied weight"
    total, *lines = capsys.readouterr().out.splitlines()
    assert total == f"model        {count} parameters, {count} trainable, in 3 stages"
    assert [line.split()[:4] for line in lines] == [
        ["stage", f"{one}", "layers", f"{one}-{one}:"] for one in range(3)
    ]
    for line, size in zip(lines, each, strict=True):
        assert line.endswith(human_bytes(size))


def test_sizes_and_counts_for_people():
    sizes = {1023: "1023 B", 1536: "1.5 KiB", 2**20 - 1: "1.0 MiB", 3 * 2**50: "3072.0 TiB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
    counts = {0: "0", 999: "999", 1000: "1.0 K", 999_999: "1.0 M", 134_515_008: "134.5 M"}
    assert {count: human_count(count) for count in counts} == counts


def test_memory_of_stages_has_one_unit():
    assert human_memory([600 * 2**20, 2**20]) == "600/1 MiB"
    assert human_memory([3 * 2**29, 2**30]) == "1.5/1.0 GiB"
    assert human_memory([]) == "?"


def test_peak_memory_is_between_what_is_held_and_what_ever_was():
    block = bytearray(os.urandom(1024) * (64 * 1024))
    held = psutil.Process().memory_info().rss
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = peak_memory(torch.device("cpu"))
    slack = 2**21  # the kernel counts in batches
    assert len(block) == 2**26 and held - slack <= peak <= most + slack
    assert gather_peaks([torch.device("cpu")]) == [peak_memory(torch.device("cpu"))]  # no group


def test_streaming_tells_the_memory_of_its_gpus_and_not_the_hosts(monkeypatch):
    cards = fake_accelerators(
        monkeypatch,
        "cuda",
        2,
        max_memory_allocated=lambda card: 2**30 * (1 + card.index),
        mem_get_info=lambda card: (2**30 * (2 - card.index), 2**32),
    )
    found = []
    monkeypatch.setattr(train_engines, "TrainingParts", lambda *_, **__: None)
    monkeypatch.setattr(
        train_engines, "train", lambda parts, context, **_: found.append(context.devices)
    )
    plan = SimpleNamespace(run=RunConfig())
    plan.topology = SimpleNamespace(schedule=streaming_schedule(3))
    train_engines.run_streaming(plan, None)
    assert found == [tuple(cards)]
    assert gather_peaks(cards) == [2**30, 2**31]
    account = MemoryAccount(cards, ["less"])
    weights = [torch.zeros(2**18)]
    monkeypatch.setattr(account, "parts", lambda: {"weights": weights[0].nbytes})
    assert "In use: 3.00 GiB of 4.00 GiB on cuda:1" in account.describe()
    assert "the peak was 2.00 GiB" in account.describe()


def test_what_helps_a_run_that_answers_is_said_while_it_does():
    run = RunConfig(rollouts=RolloutOptions(prompts_together=1))
    account = MemoryAccount(
        [torch.device("cpu")],
        memory_remedies(run, has_gpu=False),
        train_engines.answering_remedies(run),
    )
    assert "--gradient-checkpointing" in account.describe()
    with progress.doing("decoding"):
        assert "helps: a smaller --rollouts.max_completion_length (now 512);" in account.describe()
