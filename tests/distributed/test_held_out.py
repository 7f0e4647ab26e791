"""Evaluation during training against plain transformers, row by row in one process.

The set divides by no batch, rows have different lengths, and the stages get what the loader gives.
"""

import pytest
import torch
from transformers import AutoConfig

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.load import load_split_model
from stageline.data.batches.loader import MicroBatchLoader
from stageline.pipeline.runner import PipelineRunner
from stageline.training.evaluation import evaluate
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import VOCAB_SIZE

KEPT = 5
# fewer rows than a batch, than a micro-batch; one more than whole batches, one less, just whole
COUNTS = (1, 3, 7, 8, 9)


@torch.no_grad()
def make_rows(whole, count):
    """Rows of (ids, labels) with 1 to 6 targets each; the model guesses about half of them."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(count):
        ids = torch.randint(9, VOCAB_SIZE, (6 + 3 * (index % 4) + index,), generator=generator)
        for place in range(len(ids) - 1):
            if torch.rand((), generator=generator) < 0.5:
                ids[place + 1] = whole(input_ids=ids[None, : place + 1]).logits[0, -1].argmax()
        labels = ids.clone()
        labels[: len(ids) - 1 - index % 6] = -100
        rows.append((ids, labels))
    return rows


def collate(rows):
    width = max(len(ids) for ids, _ in rows)
    batch = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.long),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.long),
        "labels": torch.full((len(rows), width), -100),
    }
    for row, (ids, labels) in enumerate(rows):
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["labels"][row, : len(ids)] = labels
    return batch


@torch.no_grad()
def plain_figures(whole, rows):
    """Loss and hits of each row alone, no padding, no batches."""
    loss, hits, targets, predicted = 0.0, 0, 0, []
    for ids, labels in rows:
        logits = whole(input_ids=ids[None]).logits[0, :-1]
        is_target = labels[1:] != -100
        wanted = labels[1:][is_target]
        guesses = logits.argmax(-1)[is_target]
        log_shares = logits.double().log_softmax(-1)[is_target]
        loss -= log_shares.gather(1, wanted[:, None]).sum().item()
        hits += int((guesses == wanted).sum())
        targets += len(wanted)
        predicted.append(guesses.tolist())
    return loss / targets, hits / targets, targets, predicted


def split_figures(rank, folder, num_stages, rows, batch_size):
    config = AutoConfig.from_pretrained(folder)
    model = CausalLMStage(config, stage=rank, num_stages=num_stages, dtype=torch.float32)
    load_split_model(model, folder, device="cpu", dtype=torch.float32)
    model.frozen()
    model.train()
    runner = PipelineRunner(model, device=torch.device("cpu"))
    figures = {}
    for count in COUNTS:
        loader = MicroBatchLoader(
            rows[:count],
            collate=collate,
            batch_size=batch_size,
            micro_batch_size=2,
            shuffle=False,
            eval=True,
        )
        found = evaluate(runner, loader, loss_fn=sft, keep=KEPT)
        again = evaluate(runner, loader, loss_fn=sft, keep=KEPT)
        assert found == again
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters()), "forward only"
        figures[count] = [found.loss, found.token_accuracy, found.num_targets, found.predicted]
    return figures


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_every_held_out_row_counts_once(num_stages, tmp_path):
    whole = tiny_whole("llama")
    with torch.no_grad():  # sure of itself, so that losses differ
        whole.lm_head.weight.mul_(8)
    whole.save_pretrained(tmp_path)
    rows = make_rows(whole, max(COUNTS))
    ranks = run_ranks(split_figures, num_stages, tmp_path, num_stages, rows, 4)
    for figures in ranks:
        assert figures == ranks[0], "all ranks know the same"
    losses, accuracies = set(), set()
    for count in COUNTS:
        loss, accuracy, num_targets, predicted = plain_figures(whole, rows[:count])
        found = ranks[0][count]
        assert found[0] == pytest.approx(loss, rel=1e-6)
        assert found[1:3] == [accuracy, num_targets]
        assert found[3] == predicted[:KEPT]
        losses.add(round(loss, 4))
        accuracies.add(accuracy)
    assert len(losses) == len(COUNTS), "a row left out would be seen"
    assert len(accuracies) > 2, "some are hit and some are not"
