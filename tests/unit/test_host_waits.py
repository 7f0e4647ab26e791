"""Inside a micro-batch nothing asks the device for a number: waits are counted by place.

On a CPU: while a pass runs, all its inputs count as on the device, so each of these operators
would be a wait of the host on a GPU. Waits of transformers' vision towers are named below.
"""

import contextlib
import functools
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from loss_fn import sft
from stageline.data.batches.batch import pack_rows
from stageline.data.text.encode import Encoded
from stageline.modules.chunked_loss import LossByToken
from stageline.pipeline.recorder import Recorder
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.stage_passes import torch_splits_backward
from stageline.training.step import TrainStep
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.unit.test_checkpointing import LORA, make_stage

WAITS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave.Tensor"),
}
INDEXING = {"index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default"}
ROOT = str(Path(__file__).resolve().parents[2])


class Waits(TorchDispatchMode):
    """Counts what would make the host wait, by (operator, innermost file outside of torch)."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        indices = args[1] if name in INDEXING else ()
        has_mask = any(each is not None and each.dtype == torch.bool for each in indices)
        if name in WAITS or name.partition(".")[0] in WAITS or has_mask:
            self.found[name.partition(".")[0], place()] += 1
        return func(*args, **(kwargs or {}))


def place():
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            return file.removeprefix(ROOT + "/").rpartition("site-packages/")[2]
        frame = frame.f_back
    return "?"


class CountsPasses(Recorder):
    """A recorder that counts only inside passes; loads and sends come between them."""

    def __init__(self):
        super().__init__(torch.device("cpu"), rank=0)
        self.waits = Waits()

    @contextlib.contextmanager
    def span(self, action):
        with self.waits:
            yield


@pytest.fixture(autouse=True)
def alone():
    """Open a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch_splits_backward()  # its trial would count as a wait of the first pass


def packed(batches):
    rows = []
    for batch in batches:
        pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ids = [row[mask.bool()].tolist() for row, mask in pairs]
        rows.append([Encoded(one, [True] * len(one), [False] * len(one)) for one in ids])
    return [pack_rows(rows, pad_token_id=0)]


def waits_of(family, *, chunk=0, makes=list, with_facts=True, **options):
    stage = make_stage(family, dropout=False, **options)
    loss_fn = functools.partial(sft, num_targets=torch.tensor(8.0))
    if chunk:
        stage.logits_chunk = chunk
        loss_fn = functools.partial(
            LossByToken(sft, whole=stage.whole, chunk=chunk), num_targets=torch.tensor(8.0)
        )
    runner = PipelineRunner(stage, device=torch.device("cpu"))
    batches = makes(tiny_micro_batches(family))
    if with_facts:
        batches = [{**batch, **stage.host_facts(batch)} for batch in batches]
    recorder = CountsPasses()

    def loss_of(output, batch):
        output = output[0] if isinstance(output, tuple) else output
        return loss_fn(output, batch)

    runner.step(batches, loss_fn=loss_of, recorder=recorder)
    return recorder.waits.found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("mixtral", {"output_router_logits": True}),
        ("llama", LORA),
        ("llama", {"makes": packed}),
        ("llama", {"chunk": 5}),
    ],
    ids=["full", "windows", "experts", "lora", "packed", "chunked loss"],
)
def test_no_pass_of_a_decoder_waits_for_its_device(family, options):
    found = waits_of(family, **options)
    if family == "mixtral":  # its eager experts are asked which of them were chosen
        found = {key: count for key, count in found.items() if "integrations/moe" not in key[1]}
    assert not found


def test_without_what_the_host_knows_each_pass_would_wait():
    found = waits_of("llama", with_facts=False)
    assert found["_local_scalar_dense", "transformers/masking_utils.py"] >= 4  # micro-batches


# transformers' towers on the first stage read the sizes of images on their device, and count the
# tokens of images
TOWER = ("modeling_qwen2_vl.py", "vision_utils.py", "import_utils.py", "modeling_internvl.py")


@pytest.mark.parametrize("family", ["internvl", "qwen2_vl"])
def test_of_a_vision_model_the_tower_alone_waits(family):
    found = waits_of(family)
    assert {Path(file).name for _, file in found} <= set(TOWER)
    if family == "qwen2_vl":  # positions were ten waits a picture
        before = sum(waits_of(family, with_facts=False).values())
        assert sum(found.values()) < before / 3


def test_the_end_of_a_step_reads_all_its_numbers_at_once(monkeypatch):
    stage = make_stage("llama", dropout=False)
    runner = PipelineRunner(stage, device=torch.device("cpu"))
    step = TrainStep(
        runner,
        make_optimizer=lambda named: torch.optim.SGD(named.values(), lr=0.1),
        loss_fn=sft,
        learning_rate=lambda step: 0.1,
    )
    reads, passes = [], runner.step

    def counted(*args, **kwargs):
        made = passes(*args, **kwargs)
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
            plain = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, functools.partialmethod(read, name, plain))
        return made

    def read(tensor, name, plain, *args):
        reads.append(name)
        return plain(tensor, *args)

    monkeypatch.setattr(runner, "step", counted)
    result = step(tiny_micro_batches("llama"), step=0)
    monkeypatch.undo()
    assert result.grad_norm > 0 and reads == ["tolist"]
