"""Runs whose model answers before each step: the same in every split, and after a kill."""

import functools
import json
import re
import traceback

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
)

from stageline.contracts import SHARED
from stageline.data.images.images import ImageExpander
from stageline.modules import recompute
from stageline.modules.policy_loss import ADVANTAGES, OLD, SAMPLED
from stageline.training.rollouts import Rollouts
from tests.helpers.grpo_runs import (
    AHEAD,
    GRPO,
    LORA,
    PARTS,
    REPLICAS,
    TWICE,
    ZBV,
    assert_same_but_for_sums,
    assert_same_bytes,
    assert_same_figures,
    last_tensors,
    records,
    run,
    samples,
    trained,
)
from tests.helpers.small_run import Job
from tests.helpers.small_vision_run import VisionJob
from tests.helpers.tiny_datasets import write_lines
from tests.helpers.tiny_models import tiny_processor


def job_in(folder, **options):
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    return Job(folder, **options)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    made = job_in(tmp_path_factory.mktemp("grpo"), num_layers=4)
    trained(made, "one", *TWICE, *LORA, ranks=1)
    return made


def test_what_a_run_tells(job):
    steps = records(job, "one")
    assert [steps[step]["ratio_gap"] for step in (1, 3)] == [0, 0], "to the bit"
    assert min(steps[step]["ratio_gap"] for step in (2, 4)) > 1e-4
    assert steps[1]["kl"] == 0 and steps[2]["kl"] > 0
    assert steps[1]["sampling_gap"] < 1e-5
    assert steps[1]["clip_low"] == 0 and max(steps[s]["clip_low"] for s in (2, 4)) > 0
    answers = [json.loads(line) for line in samples(job, "one").splitlines()]
    assert [one["step"] for one in answers] == [1] * 4 + [3] * 4, "4 prompts, twice"
    first = [one for record in answers[:4] for one in record["answers"]]
    rewards = torch.tensor([one["reward"] for one in first], dtype=torch.float64)
    assert len(first) == 16 and steps[1]["reward"] == pytest.approx(rewards.mean().item())
    assert steps[1]["reward_std"] == pytest.approx(rewards.std().item())
    for one in first:
        letters = sum(map(ord, one["text"])) % 7 / 7
        assert one["rewards"]["letters"] == pytest.approx(letters)
        wanted = letters + 0.1 * one["rewards"]["length"]
        assert one["reward"] == pytest.approx(wanted) and one["num_tokens"] <= 8
    group = torch.tensor([one["reward"] for one in answers[0]["answers"]], dtype=torch.float64)
    told = torch.tensor([one["advantage"] for one in answers[0]["answers"]], dtype=torch.float64)
    torch.testing.assert_close(told, (group - group.mean()) / (group.std() + 1e-4))
    lengths = [one["num_tokens"] for one in first]
    assert steps[1]["longest_answer"] == max(lengths)
    assert steps[1]["cut_answers"] == sum(one["is_cut"] for one in first) / 16
    assert steps[1]["num_targets"] == sum(lengths)
    assert "reward" not in steps[1]["loss_figures"] and "kl" in steps[1]["loss_figures"]


FIGURES = ("loss", "kl", "entropy", "grad_norm", "reward", "ratio_gap")


def test_another_split_draws_and_learns_the_same(job, monkeypatch):
    """Kill it on zbv; the rest runs on two stages of 1f1b."""
    reads_once = checked(Rollouts._batches, lambda batches: any(SHARED in one for one in batches))
    monkeypatch.setattr(Rollouts, "_batches", reads_once)
    options = (*TWICE, *LORA)
    killed_again(job, "split", options, "at=forward,step=2,do=sigkill", ZBV)
    assert_same_bytes(job, "split", "one")
    assert_same_figures(job, "split", FIGURES, rel=1e-6, abs=1e-9)


def test_answers_packed_into_rows_and_logits_in_chunks(job, monkeypatch):
    monkeypatch.setattr(Rollouts, "_batches", checked(Rollouts._batches, holds_several))
    options, ranks = ZBV
    options += ("--packing", "--max-token-num", 96, "--logits-chunk", 5)
    trained(job, "packed", *TWICE, *LORA, *options, ranks=ranks)
    assert_same_but_for_sums(job, "packed", "one")
    steps = records(job, "packed")
    assert [steps[step]["ratio_gap"] for step in (1, 3)] == [0, 0], "to the bit"
    figures = ("loss", "kl", "entropy", "grad_norm", "sampling_gap", "num_targets")
    assert_same_figures(job, "packed", figures, rel=1e-3, abs=1e-6)


def checked(made, holds):
    """Return the method, with a check of its micro-batches."""

    def noted(self, *given):
        batches = made(self, *given)
        assert holds(batches)
        return batches

    return noted


def holds_several(batches):
    """Return whether some rows hold more than one answer."""
    return max(batch["sample_ids"].max() for batch in batches) > 0


def killed_again(job, name, options, fault, split=((), 2)):
    """Kill a run on some ranks by a fault, and resume it on two."""
    more, ranks = split
    chaos = f"rank=0,{fault}"
    assert run(job, name, *options, *more, ranks=ranks, chaos=chaos, waits=True).code != 0
    assert job.checkpoints(name) == ["step-00000002"], fault
    done = trained(job, name, *options, "--resume", "auto")
    assert "2 of 4 steps are done" in done.out


def test_compiled_layers_answer_as_they_were_written(job, monkeypatch):
    """Compile with a backend that runs graphs as they are, and checks the passes they are for."""

    def backend(graph, inputs):
        passes = {frame.filename.rpartition("/")[2] for frame in traceback.extract_stack()}
        assert "stage_decoder.py" not in passes
        open(job.folder / "compiled", "w").close()
        return graph

    compiling = functools.partial(recompute.compile_layers, backend=backend)
    monkeypatch.setattr(recompute, "compile_layers", compiling)
    shallow = job_in(job.folder / "shallow", num_layers=1)
    options = (*TWICE, *LORA, "--total-steps", 2)
    trained(shallow, "plain", *options, ranks=1)
    trained(shallow, "compiled", *options, "--compile-layers", ranks=1)
    assert (job.folder / "compiled").exists()
    assert_same_but_for_sums(shallow, "compiled", "plain")


@pytest.fixture(scope="module")
def ahead(job):
    trained(job, "ahead", *AHEAD, ranks=1)
    return "ahead"


def test_answers_drawn_a_step_ahead(job, ahead):
    steps = records(job, ahead)
    assert [steps[step]["staleness"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert steps[1]["ratio_gap"] == 0, "by a training pass of the weights that drew them"
    assert min(steps[step]["ratio_gap"] for step in (2, 3, 4)) > 1e-4
    assert steps[2]["policy_gap"] > 100 * steps[2]["sampling_gap"] > 0
    trained(job, "not ahead", *AHEAD[2:], "--total-steps", 2, ranks=1)
    ours, others = (samples(job, name).splitlines() for name in (ahead, "not ahead"))
    assert ours[:4] == others[:4] and ours[4:8] != others[4:8]


def test_a_slow_judge_works_while_the_step_before_trains(job):
    """It would wait for ever if the run waited for it."""
    options = (*AHEAD, "--reward", "patient,length", "--total-steps", 2)
    trained(job, "patient", *options, ranks=1)


def test_shares_that_answer_ahead_in_packed_rows(job, ahead):
    trained(job, "ahead shared", *AHEAD, *REPLICAS, "--dp-shard", "--packing", ranks=2)
    assert_same_but_for_sums(job, "ahead shared", ahead)


def test_answers_in_flight_outlive_a_kill(job, ahead):
    """They were drawn by weights that are gone."""
    killed_again(job, "ahead killed", AHEAD, "at=rewards,step=3,do=sigkill")
    assert_same_bytes(job, "ahead killed", ahead)
    assert records(job, "ahead killed")[3]["staleness"] == 1


def test_several_steps_on_answers_drawn_ahead(job):
    """Use replicas, evaluations in between, and answers for two steps each."""
    options = (*AHEAD, *TWICE, "--eval-samples", 4)
    assert run(job, "ahead twice", *options, "--eval-steps", 4, ranks=1).code == 0
    options += ("--eval-steps", 2)
    steps = records(job, "ahead twice")
    assert [steps[step]["staleness"] for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    trained(job, "ahead both", *options, *REPLICAS, ranks=2)
    assert samples(job, "ahead both") == samples(job, "ahead twice")
    tensors = last_tensors(job, "ahead both")
    for key, value in last_tensors(job, "ahead twice").items():
        torch.testing.assert_close(tensors[key], value, rtol=0, atol=1e-5, msg=key)


def test_a_stale_update_is_the_one_written_out(job, tmp_path, monkeypatch):
    """Compare with plain torch: drawn by the old weights, ratios to these, clipped."""
    made = Rollouts._make

    def noted(self, drawn, step):
        batches = made(self, drawn, step)
        torch.save([dict(batch) for batch in batches], tmp_path / f"{step}.pt")
        return batches

    monkeypatch.setattr(Rollouts, "_make", noted)
    rate, options = 0.3, ("--optimizer", "sgd", "--lr-scheduler", "constant", "--max-grad-norm", 0)
    numbers = ("--learning-rate", rate, "--weight-decay", 0, "--loss-fn.epsilon", 0.01)
    trained(job, "stale", "--rollouts.ahead", 1, *options, *numbers, ranks=1)
    now, before = (AutoModelForCausalLM.from_pretrained(job.model) for _ in range(2))
    clipped = 0
    for step in range(4):
        batches = torch.load(tmp_path / f"{step}.pt")
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        loss = 0
        for batch in batches:
            labels = batch["labels"][:, 1:]
            is_learnt = labels != -100

            def log_probs(model, batch=batch, labels=labels):
                given = {name: batch[name] for name in ("input_ids", "attention_mask")}
                found = model(**given).logits[:, :-1].log_softmax(-1)
                return found.gather(-1, labels.clamp(min=0)[..., None])[..., 0]

            with torch.no_grad():
                old = log_probs(before)[is_learnt]
            for column in (OLD, SAMPLED):
                torch.testing.assert_close(batch[column][:, :-1][is_learnt], old, rtol=0, atol=1e-5)
            ratios = (log_probs(now)[is_learnt] - old).exp()
            worth = batch[ADVANTAGES][:, None].expand(labels.shape)[is_learnt]
            bounded = ratios.clamp(0.99, 1.01)
            clipped += (bounded * worth < ratios * worth).sum().item()
            loss = loss - torch.minimum(ratios * worth, bounded * worth).sum() / count
        before.load_state_dict(now.state_dict())
        now.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in now.parameters():
                parameter -= rate * parameter.grad
    assert clipped > 10, "nothing was stale"
    saved = load_file(job.folder / "stale" / "checkpoints" / "step-00000004" / "model.safetensors")
    for name, value in now.state_dict().items():
        if name in saved:
            torch.testing.assert_close(saved[name], value, rtol=0, atol=2e-6, msg=name)


def test_full_weights_and_held_out_prompts(job):
    options = ("--eval-samples", 4, "--eval-steps", 2, "--save-best", "reward")
    options += ("--rollouts.keep_samples", 2, "--loss-fn.loss-type", "dr_grpo")
    trained(job, "full", *options, ranks=1)
    held_out = records(job, "full", "eval")
    assert held_out.keys() == {0, 2, 4} and held_out[0].keys() >= {"reward", "reward_letters"}
    assert (job.folder / "full" / "checkpoints" / "best").exists()
    kept = {json.loads(line)["step"] for line in samples(job, "full").splitlines()}
    assert kept == {1, 3}
    trained(job, "full shares", *options, *REPLICAS, "--dp-shard", "--eval-samples", 1, ranks=2)
    assert_same_but_for_sums(job, "full shares", "full")


def test_views_of_a_scene_are_judged_together(job):
    """A dataset with groups: whole ones in each step, packed or not."""
    views = [
        {
            "id": str(i),
            "anchor": {"question": f"{i}?", "answer": "!"},
            "positive": {"question": f"left of {i}?", "answer": "!"},
            "negatives": [{"question": f"{i} and {i}?", "answer": "no"}],
        }
        for i in range(12)
    ]
    write_lines(job.folder / "views.jsonl", views)
    options = ("--dataset", "groups", "--dataset-path", job.folder / "views.jsonl")
    options += ("--import", "examples.spatial.parts")
    options += ("--reward", "spatial_consistency,letters,length")
    options += ("--rollouts.reward_weights", "1,1,0.1")
    options += ("--rollouts.group_size", 2, "--eval-samples", 3)
    done = run(job, "cut views", *options, ranks=1)
    assert (
        done.code == 2 and "8 prompts a step do not fit the dataset's groups of 3 rows" in done.err
    )
    assert "Make --batch-size a multiple of 6." in done.err
    drawn = []
    options += ("--batch-size", 12, "--total-steps", 1)
    packed = ("--packing", "--max-token-num", 96)
    for name, more, ranks in (("views", (), 2), ("packed views", packed, 1)):
        trained(job, name, *options, *more, ranks=ranks)
        drawn.append(samples(job, name).splitlines()[:6])
        assert records(job, name, "eval")[0]["reward"] == records(job, "views", "eval")[0]["reward"]
    assert drawn[0] == drawn[1], "the first step's answers"
    groups = [json.loads(line)["id"] for line in drawn[0]]
    assert len(groups) == 6, groups


def test_a_reward_that_raises_ends_all_ranks_and_is_told_first(job):
    broken = ("--reward", "broken,length", "--reward.broken.on-rank", 1)
    words = ("--import", job.folder / "parts.py", *GRPO, *broken, *REPLICAS)
    started = job.start_forked("broken", *words)
    done = started.wait()
    assert done.code == started.codes[0] == 2, "none by a lost connection"
    line = PARTS.splitlines().index('@reward_register("broken")') + 1
    part = f"broken ({job.folder}/parts.py:{line})"
    told = re.escape(f": the reward {part} raised KeyError: 'depth'")
    where = r"error\[contract\] rank=1 stage=0 step=\d"
    assert re.match(where + told, done.err) and done.err.count("\n") == 1, done.err
    log = (job.folder / "broken/failures/rank-1.log").read_text()
    assert 'raise KeyError("depth")' in log


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--rollouts.kl_beta", 0.1, "--reference", "adapters_off"), "--reference frozen_copy"),
        (("--rollouts.kl_beta", 0.1, "--reference", "precompute"), "--reference precompute"),
        (("--rollouts.group_size", 3), "--rollouts.group_size 3"),
        (("--rollouts.reward_weights", "1"), "--rollouts.reward_weights has 1 numbers"),
        (("--rollouts.inner_steps", 3), "--rollouts.inner_steps 3"),
        (("--engine", "streaming"), "--engine streaming"),
        (("--loss-fn", "sft"), "--reward letters,length: --loss-fn sft takes no reward"),
        (("--rollouts.max_completion_length", 60), "do not fit --max-token-num 64"),
    ],
)
def test_what_cannot_be_done_is_told(job, options, wanted):
    done = run(job, "refused", *options, ranks=1)
    assert done.code in (2, 3) and wanted in done.err, done.err


@pytest.mark.parametrize("family", ["internvl", "qwen2_vl"])
def test_pictures_are_asked_about(family, tmp_path, monkeypatch):
    """Leave tokens after an image token that a random model writes out of the loss."""
    (tmp_path / "parts.py").write_text(PARTS)
    pictured = VisionJob(tmp_path, family=family)
    image_ids = ImageExpander.of(tiny_processor(family)).own_ids()
    made, seen = Rollouts._batches, []

    def noted(self, *given):
        batches = made(self, *given)
        seen.extend(batches)
        for batch in batches:
            learnt = batch["labels"] != -100
            assert (batch[SAMPLED][:, :-1][learnt[:, 1:]] < 0).all()
            for row, ids in enumerate(batch["labels"].tolist()):
                places = [place for place, one in enumerate(ids) if one in image_ids]
                assert len(places) < 2 and not any(i != -100 for p in places for i in ids[p + 1 :])
                if places:
                    assert batch["input_ids"][row, places[0]].item() not in image_ids
                    open(tmp_path / "met", "w").close()
        return batches

    monkeypatch.setattr(Rollouts, "_batches", noted)
    options = ("--micro-batch-size", 4, "--rollouts.max_completion_length", 24)
    options += ("--total-steps", 2, *TWICE)
    trained(pictured, "one", *options, ranks=1)
    assert records(pictured, "one")[1]["ratio_gap"] == 0
    if family == "internvl":  # both families have two stages below, where sums differ
        trained(pictured, "two", *options, ranks=2)
        assert samples(pictured, "one") == samples(pictured, "two")
        assert records(pictured, "one")[1]["loss"] == records(pictured, "two")[1]["loss"]
    assert (tmp_path / "met").exists(), "no answer held such a token: the test shows nothing"
    monkeypatch.setattr(Rollouts, "_batches", checked(made, holds_several))
    options += ("--packing", "--max-token-num", 256)
    trained(pictured, "packed", *options, ranks=2)
    assert samples(pictured, "packed") == samples(pictured, "one")
    ours, wanted = records(pictured, "packed"), records(pictured, "one")
    assert [ours[step]["loss"] for step in (1, 2)] == pytest.approx(
        [wanted[step]["loss"] for step in (1, 2)], rel=1e-4, abs=1e-6
    )


def test_replicas_with_shares_ask_about_pictures(tmp_path):
    """Some prompts have none: the tower's weights come when those of its replica's do."""
    (tmp_path / "parts.py").write_text(PARTS)
    pictured = VisionJob(tmp_path)
    for name, shares in (("whole", ()), ("shares", ("--dp-shard",))):
        frozen = ("--parts.vit.frozen", "--parts.mlp.frozen", *shares)
        options = (*frozen, "--micro-batch-size", 4, "--total-steps", 2)
        trained(pictured, name, *REPLICAS, *options, ranks=2)
    assert_same_but_for_sums(pictured, "shares", "whole")


def test_half_types_draw_the_same_in_every_split(tmp_path):
    """The head computes in float32 by default; the gap is logged, and smaller than without."""
    (tmp_path / "parts.py").write_text(PARTS)
    half = Job(tmp_path, num_layers=4)
    options = ("--bf16", "--loss-fn", "grpo", "--total-steps", 2)
    cast = ("--fp32.logits", "false", "--total-steps", 1)
    for name, more, ranks in (("one", (), 1), ("four", (), 4), ("half head", cast, 1)):
        trained(half, name, *options, *more, ranks=ranks)
    assert samples(half, "four") == samples(half, "one")
    config = (half.folder / "one" / "config.yaml").read_text()
    assert "logits: true" in config
    first, cast = (records(half, name)[1] for name in ("one", "half head"))
    for record in (first, cast):
        assert record["sampling_gap_max"] > record["sampling_gap"] > 0
        assert 0 <= record["sampling_gap_clipped"] <= 1
    assert first["sampling_gap"] < cast["sampling_gap"]
