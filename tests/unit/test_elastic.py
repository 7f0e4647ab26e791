"""Elastic runs: which plan another number of ranks has, and which failures are worth a restart."""

import dataclasses
import itertools
import json
import os

import pytest

from commands import elastic as plans
from commands.elastic import Interruption, on_ranks, ranks_in_words, settle_ranks
from options.fields import OptionError, check_together
from options.train import RunConfig, check_elastic, settled
from stageline.distributed import elastic
from stageline.distributed.elastic import Elastic, Ended, computing, run_elastic
from stageline.errors import UserError

RUN = RunConfig(elastic=True, save_steps=10, num_stages=4, batch_size=8, micro_batch_size=1)


def shape(run, count):
    """(stages, replicas, accumulated batches) on so many ranks."""
    found = on_ranks(run, count)
    return found and (found.num_stages, found.dp_degree, found.accumulate_steps)


def test_a_pipeline_gets_as_many_stages_as_ranks_are_left():
    assert on_ranks(RUN, 4) is RUN
    assert [shape(RUN, n) for n in (3, 2, 1)] == [(3, 1, 1), (2, 1, 1), (1, 1, 1)]


def test_two_stages_a_rank_stay_two():
    run = dataclasses.replace(RUN, schedule="zbv", num_stages=8)
    assert shape(run, 3) == (6, 1, 1)
    assert settle_ranks(run, 3).num_micro_batches == 8


def test_a_tower_with_stages_of_its_own_leaves_one_for_the_layers():
    run = dataclasses.replace(RUN, vision_stages=1)
    assert shape(run, 2) == (2, 1, 1) and shape(run, 1) is None
    with pytest.raises(UserError, match="no plan of stages for so many"):
        settle_ranks(run, 1)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_takes_the_same_samples_on_any_number_of_ranks(monkeypatch, degree, accumulate):
    monkeypatch.setattr(plans, "_most_stages", lambda run, other: None)
    run = dataclasses.replace(RUN, num_stages=2, dp_degree=degree, accumulate_steps=accumulate)
    run = dataclasses.replace(run, dp_shard=degree > 1)
    for count in range(1, 2 * degree + 1):
        found = on_ranks(run, count)
        assert found.num_stages * found.dp_degree == count and found.dp_degree <= degree
        assert found.dp_degree * found.accumulate_steps == degree * accumulate
        assert found.dp_shard == (found.dp_degree > 1)
        # no other plan of that many ranks has more replicas
        rivals = range(found.dp_degree + 1, min(degree, count) + 1)
        assert all(count % n or degree * accumulate % n for n in rivals) or count == 2 * degree
        batches = {field: getattr(run, field) for field in ("batch_size", "micro_batch_size")}
        assert batches == {field: getattr(found, field) for field in batches}


def test_more_stages_than_the_model_has_layers_are_no_plan(monkeypatch):
    run = dataclasses.replace(RUN, num_stages=2, dp_degree=2)
    monkeypatch.setattr(plans, "_most_stages", lambda run, other: 2)
    assert shape(run, 3) is None
    assert plans.make_elastic(run, 4).fitting(3) == 2
    assert shape(run, 2) == (1, 2, 1)


def test_more_processes_than_wanted_are_refused():
    assert settle_ranks(RUN, None) is RUN
    with pytest.raises(UserError, match=r"5 processes .*--num-stages 4 x --dp-degree 1"):
        settle_ranks(RUN, 5)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"partition": [2, 1, 1, 1]}, "--partition 2,1,1,1 came with --elastic"),
        ({"schedule": "mine.csv"}, "--schedule mine.csv came with --elastic"),
        ({"resume": "runs/x/checkpoints/step-00000010"}, "--resume runs/x"),
    ],
)
def test_what_holds_for_one_number_of_ranks_alone_is_refused(changed, word):
    with pytest.raises(OptionError) as error:
        check_elastic(settled(dataclasses.replace(RUN, **changed)))
    assert str(error.value).startswith(word)


def test_it_resumes_and_needs_checkpoints():
    assert settled(RUN).resume == "auto"
    check_elastic(settled(RUN))
    with pytest.raises(OptionError, match=r"--elastic came without --save-steps"):
        check_together(RunConfig(elastic=True))
    with pytest.raises(OptionError, match=r"--max-restarts 3 came without --elastic"):
        check_together(RunConfig(max_restarts=3))


# -- restarts ------------------------------------------------------------------------------------


class Cards:
    """So many cards for each question in turn; the last number holds from then on."""

    variable = "CUDA_VISIBLE_DEVICES"

    def __init__(self, *counts):
        self.counts = itertools.chain(counts, itertools.repeat(counts[-1]))

    def usable(self, *, is_sure):
        count = next(self.counts)
        return None if count is None else [str(index) for index in range(count)]


def log_step(folder, step):
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": step, "loss": 1.0, "time": 0.0}) + "\n")


def run_with(folder, ends, *, cards=(None,), max_restarts=10, num_ranks=4, fitting=lambda n: n):
    """(code, ranks of each start) of starts that end as told: (code, last step), or an Ended."""
    ends, counts = iter(ends), []
    decides = Elastic(num_ranks, fitting, max_restarts, folder, Cards(*cards))

    def start(count, makes_room):
        counts.append(count)
        ended = next(ends)
        if isinstance(ended, Ended):
            return ended
        code, step = ended
        if step:
            log_step(folder, step)
        return Ended(code)

    return run_elastic(start, decides), counts


@pytest.fixture(autouse=True)
def keep_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_lost_card_and_its_return(tmp_path, capfd):
    room = Ended(143, makes_room=True)
    done = run_with(tmp_path, [(9, 5), room, (0, 0)], cards=(4, 3, 4))
    assert done == (0, [4, 3, 4])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert capfd.readouterr().err.splitlines() == [
        "elastic: restart 1 of 10",
        "elastic: starts on 3 of 4 ranks, cards 0,1,2",
        "elastic: cards are back; everything was saved",
        "elastic: starts on 4 of 4 ranks, cards 0,1,2,3",
    ]


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 6, 7, 10, 130, 143])
def test_what_another_start_would_not_mend_ends_the_run(tmp_path, code):
    assert run_with(tmp_path, [(code, 5)]) == (code, [4])


@pytest.mark.parametrize("code", [8, 9])
def test_a_hang_and_a_crash_are_worth_a_restart(tmp_path, code):
    assert run_with(tmp_path, [(code, 5), (0, 9)]) == (0, [4, 4])


def test_a_signal_to_the_launcher_ends_the_run_whatever_it_was_at(tmp_path):
    assert run_with(tmp_path, [Ended(9, is_asked=True)]) == (9, [4])
    asked = Ended(143, is_asked=True, makes_room=True)
    assert run_with(tmp_path, [asked], cards=(3, 4)) == (143, [3])


def test_restarts_are_counted(tmp_path, capfd):
    ends = [(9, step) for step in range(1, 9)]
    assert run_with(tmp_path, ends, max_restarts=3) == (9, [4] * 4)
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("elastic: the run ends: 3 restarts are done, no more were allowed (")


def test_a_failure_that_comes_back_at_the_same_step_ends_the_run(tmp_path, capfd):
    ends = [(9, 3), (9, 7), (9, 7), (9, 0), (9, 7), (0, 9)]
    assert run_with(tmp_path, ends) == (9, [4] * 5)
    assert "it has failed at step 7 4 times in a row" in capfd.readouterr().err


def test_a_step_more_is_progress(tmp_path):
    ends = [(9, 7), (9, 7), (9, 7), (9, 8), (9, 8), (0, 9)]
    assert run_with(tmp_path, ends) == (0, [4] * 6)


def test_a_checkpoint_more_is_progress_where_few_steps_are_logged(tmp_path):
    ends = [(9, 7)] + [(9, 0)] * 4 + [(0, 9)]
    steps = iter(range(100))

    def fitting(count):
        (tmp_path / "checkpoints" / f"step-{next(steps):08}").mkdir(parents=True)
        return count

    assert run_with(tmp_path, ends, fitting=fitting) == (0, [4] * 6)


def test_too_few_cards_are_said(tmp_path):
    with pytest.raises(UserError, match="1 of 4 devices are left, and the model has no plan"):
        run_with(tmp_path, [(9, 5)], cards=(4, 1), fitting=lambda n: n if n > 1 else 0)
    with pytest.raises(UserError, match="0 of 4 devices are left"):
        run_with(tmp_path, [], cards=(0,))


def test_room_is_made_once_a_step_is_done_and_a_plan_is_larger(tmp_path):
    decides = Elastic(4, lambda n: n - n % 2, 10, tmp_path, Cards(3, 4))
    assert not decides.has_more(2, since=-1.0)  # nothing is logged yet: no card is asked
    log_step(tmp_path, 1)
    assert not decides.has_more(2, since=1.0)
    assert not decides.has_more(2, since=-1.0)  # three cards, a plan for two
    assert decides.has_more(2, since=-1.0)
    assert not decides.has_more(4, since=-1.0)


def test_cards_are_tried_each_in_a_process_of_its_own(monkeypatch):
    probe = "import os, time; n = os.environ['CUDA_VISIBLE_DEVICES']; "
    probe += "assert n != '1'; time.sleep(600 * (n == '2'))"
    monkeypatch.setattr(elastic, "_PROBE", probe)
    assert computing(["0", "1", "2", "3"], "CUDA_VISIBLE_DEVICES", seconds=1.0) == ["0", "3"]


# -- the account ---------------------------------------------------------------------------------


def test_what_was_lost_is_told(tmp_path):
    words = ranks_in_words(dataclasses.replace(RUN, num_stages=3, dp_degree=1), 4)
    assert Interruption.read(tmp_path, 0, words) is None
    for step in (41, 42, 43):
        log_step(tmp_path, step)
    with (tmp_path / "log.jsonl").open("a") as file:  # a start that was killed in its first step
        file.write('{"kind": "resume", "step": 40, "time": 9.0}\n{"kind": "train", "step": 41, "lo')
    lost = Interruption.read(tmp_path, 40, words)
    assert lost.told(lambda: 14.04) == (
        "elastic: lost steps 41-43; went on from step 40 on 3 of 4 ranks (stages 3 x replicas 1), "
        "14.0 s later"
    )
    one, none, start = (Interruption.read(tmp_path, step, words) for step in (42, 43, 0))
    assert "lost step 43; " in one.told() and "lost no step; " in none.told()
    assert "lost steps 1-43; went on from the start (no checkpoint yet)" in start.told()
