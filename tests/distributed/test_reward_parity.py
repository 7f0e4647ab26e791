"""Reward models: loss and gradient of trl's trainer on any number of stages; runs, saves, exports.

The reference is `RewardTrainer.compute_loss` with trl's own collator, on transformers' whole model.
"""

import collections
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from commands.export import make_stages
from loss_fn import reward_model, rm
from pp_models import RewardStage
from register import dataset_register, import_shelf
from stageline.checkpoint.load import load_split_model
from stageline.data.batches.batch import pad_rows
from stageline.data.text.encode import Encoded
from tests.helpers.chain import run_chain
from tests.helpers.exports import export_folder
from tests.helpers.small_run import Job
from tests.helpers.tiny_models import tiny_config

import_shelf()
PAIRS = (  # lengths of chosen and rejected, margin
    ((9, 6), 0.0),
    ((4, 11), 0.7),
    ((7, 7), 0.0),
    ((12, 3), 0.2),
    ((5, 8), 0.0),
)
COEFFICIENT = 0.05


def make_pairs():
    """Return (ids of chosen, ids of rejected, margin), no id twice as the padding's."""
    generator = torch.Generator().manual_seed(2)
    return [
        tuple(torch.randint(9, 60, (length,), generator=generator).tolist() for length in lengths)
        + (margin,)
        for lengths, margin in PAIRS
    ]


def micro_batch(pairs):
    rows = []
    for ids in (ids for *both, _ in pairs for ids in both):
        is_target = [False] * (len(ids) - 1) + [True]
        rows.append(Encoded(ids, is_target, [False] * len(ids)))
    margins = torch.tensor([margin for *_, margin in pairs], dtype=torch.float32)
    return {**pad_rows(rows, pad_token_id=0), "loss_margins": margins}


def trl_loss(model, pairs):
    trainer = pytest.importorskip("trl.trainer.reward_trainer")
    collator = trainer.DataCollatorForPreference(pad_token_id=0)
    keys = ("chosen_ids", "rejected_ids", "margin")
    inputs = collator([dict(zip(keys, pair, strict=True)) for pair in pairs])

    def same(value):
        return value

    stub = SimpleNamespace(
        model=model,
        args=SimpleNamespace(center_rewards_coefficient=COEFFICIENT),
        accelerator=SimpleNamespace(gather=same, gather_for_metrics=same),
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": collections.defaultdict(list)},
    )
    loss = trainer.RewardTrainer.compute_loss(stub, model, inputs)
    return loss, {name: value[0] for name, value in stub._metrics["train"].items() if value}


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", pytest.param("qwen3_moe", id="mixture of experts")]
)
def test_loss_and_gradient_are_trls_on_1_to_4_stages(family, tmp_path):
    # in float64 transformers' eager attention gives NaN for a window that is all padding
    wide = {"sliding_window": 32} if family == "gemma2" else {}
    config = tiny_config(family, num_labels=1, pad_token_id=0, **wide)
    config._experts_implementation = "eager"  # grouped products of experts know no float64
    torch.manual_seed(0)
    whole = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64).train()
    whole.save_pretrained(tmp_path)
    pairs = make_pairs()
    loss, told = trl_loss(whole, pairs)
    loss.backward()
    reference = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    # gemma's norms and the routers compute in float32 whatever comes in
    tolerance = 1e-10 if family == "llama" else 1e-6
    for num_stages in (1, 2, 3, 4) if family == "llama" else (1, 4):
        stages = []
        for stage in range(num_stages):
            model = RewardStage(
                AutoConfig.from_pretrained(tmp_path, experts_implementation="eager"),
                stage=stage,
                num_stages=num_stages,
                dtype=torch.float64,
            )
            load_split_model(model, tmp_path, device="cpu", dtype=torch.float64)
            stages.append(model.train())
        totals = {
            "num_targets": torch.tensor(10.0),
            "num_pairs": torch.tensor(5.0, dtype=torch.float64),
        }
        figures = []

        def loss_fn(output, batch, totals=totals, figures=figures):
            found, own = rm(output, batch, **totals, center_coefficient=COEFFICIENT)
            figures.append(own)
            return found

        losses = run_chain(
            stages, [micro_batch(pairs[:3]), micro_batch(pairs[3:])], loss_fn=loss_fn
        )
        # margins are float32
        assert sum(losses).item() == pytest.approx(loss.item(), rel=max(tolerance, 1e-8))
        margin = sum(own["reward_margin"].item() for own in figures)
        assert margin == pytest.approx(told["margin"], rel=1e-5)
        assert sum(own["reward_accuracy"].item() for own in figures) == pytest.approx(
            told["accuracy"]
        )
        grads = {n: p.grad for s in stages for n, p in s.named_parameters() if p.grad is not None}
        assert set(grads) == set(reference)
        for name, grad in reference.items():
            largest = max(1e-3, grad.abs().max().item())
            difference = (grads[name] - grad).abs().max().item()
            assert difference <= tolerance * largest, (num_stages, name)


# -- runs ----------------------------------------------------------------------------------------


def rows():
    return [
        {
            "id": str(number),
            "messages": [{"role": "user", "content": f"{number}?"}],
            "chosen": [{"role": "assistant", "content": "yes " * (1 + number % 3)}],
            "rejected": [{"role": "assistant", "content": "no " * (1 + number % 4)}],
        }
        for number in range(24)
    ]


OPTIONS = (
    "--train-model reward --collate-fn rm --prompt chat --prompt-fn chat --loss-fn rm "
    "--batch-size 8 --micro-batch-size 4 --total-steps 6 --eval-samples all --save-steps 3 "
    "--dataset.test_size 5"
).split()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("reward"))
    job.rows.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return job


def scores_of(model, tokenizer):
    """Rewards of two conversations in one padded batch, as a user of the folder gets them."""
    texts = [row["messages"] + row["chosen"] for row in rows()[:3]]
    inputs = tokenizer.apply_chat_template(
        texts, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        return model.eval()(**{k: inputs[k] for k in ("input_ids", "attention_mask")}).logits


def test_two_ranks_train_resume_and_give_a_classifier(job):
    runs = {
        "one": job.fork("one", *OPTIONS, ranks=1),
        "two": job.fork("two", *OPTIONS, ranks=2),
    }
    assert {name: run.code for name, run in runs.items()} == dict.fromkeys(runs, 0), runs
    for name in ("train", "eval"):
        for one, two in zip(job.records("one", name), job.records("two", name), strict=True):
            for figure in ("loss", "reward_accuracy", "reward_margin", "chosen_reward"):
                assert two[figure] == pytest.approx(one[figure], rel=1e-5, abs=1e-7), figure
    first, *_, last = job.records("two", "eval")
    assert last["loss"] < first["loss"] and last["reward_margin"] > first["reward_margin"]
    assert "token_accuracy" not in last and "reward_accuracy" in runs["two"].out
    saved = job.folder / "two/checkpoints/step-00000006"
    resumed = job.folder / "two/checkpoints/step-00000003"
    assert json.loads((saved / "config.json").read_text())["use_cache"] is True
    job.train("again", *OPTIONS, "--resume", resumed, ranks=2)
    assert job.losses("again")[6] == pytest.approx(job.losses("two")[6], rel=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.num_labels == 1
    names = {n for file in saved.glob("*.safetensors") for n in load_file(file)}
    assert "score.weight" in names and "lm_head.weight" not in names
    tokenizer = AutoTokenizer.from_pretrained(saved)
    report = export_folder(saved, job.folder / "exported", make_stages=make_stages)
    assert report.verdict.reference == "its 2 stages" and report.verdict.difference == 0
    exported = AutoModelForSequenceClassification.from_pretrained(report.folder)
    assert torch.equal(scores_of(exported, tokenizer), scores_of(model, tokenizer))
    # used as a reward, it gives what the run logged for its held-out answers at the end
    held_out = dataset_register["jsonl"](dataset_path=str(job.rows), split="test", test_size=5)
    samples = [sample for _, sample in held_out]
    for figure, field in (("chosen_reward", "chosen"), ("rejected_reward", "rejected")):
        texts = [sample[field][0]["content"] for sample in samples]
        scores = reward_model(samples, texts, samples, path=str(saved))
        assert sum(scores) / len(scores) == pytest.approx(last[figure], rel=1e-6), figure


def test_lora_trains_the_score_whole_and_peft_reads_it(job):
    peft = pytest.importorskip("peft")
    job.train("lora", *OPTIONS, "--llm-lora-num", 1, "--parts.llm.frozen", "True", ranks=2)
    saved = job.folder / "lora/checkpoints/step-00000006"
    config = json.loads((saved / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    base = AutoModelForSequenceClassification.from_pretrained(
        job.model, num_labels=1, pad_token_id=0
    )
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    before = scores_of(base, tokenizer)
    adapted = scores_of(peft.PeftModel.from_pretrained(base, saved), tokenizer)
    assert not torch.allclose(adapted, before, atol=1e-2)
    texts = [row["chosen"][0]["content"] for row in rows()[:3]]
    scored = reward_model([], texts, rows()[:3], path=str(saved))
    torch.testing.assert_close(torch.tensor(scored), adapted[:, 0], rtol=1e-5, atol=1e-6)
    report = export_folder(saved, job.folder / "merged", merge=True, make_stages=make_stages)
    assert report.verdict.reference == "its 2 stages"
    merged = AutoModelForSequenceClassification.from_pretrained(report.folder)
    torch.testing.assert_close(scores_of(merged, tokenizer), adapted, rtol=1e-5, atol=1e-6)
    card = (report.folder / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card and "text-classification" in card
