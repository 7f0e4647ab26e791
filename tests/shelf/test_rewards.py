"""The built-in rewards: their values for written answers, and the result of a broken one."""

import http.server
import json
import re
import threading
import time
import types

import pytest
import torch

from commands.train import SHELF
from commands.train_parts import make_rewards
from options.parts import chosen_part
from parse_args import parse_train_args, save_config
from register import import_shelf, reward_register
from stageline.errors import DataError, UserError
from stageline.training.rewards import Reward, Rewards

import_shelf(*SHELF)
DIGIT = {"answer": "7", "id": "a"}
OPTIONS = {"choices": ["left", "right"], "answer": "right", "question": "Which side?"}

CASES = {
    "exact_answer": [
        ({}, DIGIT, {"7": 1, " 7. ": 1, "<think>8</think>\n<answer> 7 </answer>": 1}),
        ({}, DIGIT, {"8": 0, "it is 7": 0, "": 0}),
        ({}, {"answers": ["yes", "no"]}, {"No": 1, "maybe": 0}),
    ],
    "contains": [({}, DIGIT, {"I think it is 7.": 1, "17": 0, "<think>7</think> 8": 0})],
    "number": [
        ({}, {"answer": "1200"}, {"about 1,200": 1, "3 then 1200.0": 1, "1200 or 3": 0, "?": 0}),
        ({}, {"answer": "15"}, {"10-15": 1, "GPT-15": 1, "(1,15)": 1, "\u221215": 0, "-15": 0}),
        ({}, {"answer": "1e-3"}, {"0.001": 1, "1E-3 m": 1, "2e-3": 0, "-3": 0}),
        ({}, {"answer": "50%"}, {"50 %": 1, "50\\%": 1, "0.5": 1, "50": 0}),
        ({"tolerance": 0.5}, {"answer": "2"}, {"2.5": 1, "5/2": 1, "2.51": 0}),
        ({"tolerance": 0.1, "is_relative": True}, {"answer": "50%"}, {"0.55": 1, "0.56": 0}),
    ],
    "choice": [({}, OPTIONS, {"(B)": 1, "on the right": 1, "A": 0, "left or right": 0})],
    "format": [
        ({}, {}, {"<think>a</think>\n<answer>b</answer>": 1, "<answer>b</answer>": 0}),
        ({}, {}, {"x <think>a</think><answer>b</answer>": 0}),
        ({}, {}, {"<think>a</think><answer>b</answer> more": 0}),
        ({}, {}, {"<think>a</think><think>a</think><answer>b</answer>": 0}),
        ({"pattern": r"\d+"}, {}, {"123": 1, "12a": 0}),
    ],
    "length": [
        ({"longest": 10, "margin": 4}, {"num_tokens": 6}, {"": 0}),
        ({"longest": 10, "margin": 4}, {"num_tokens": 9}, {"": -0.75}),
        ({"longest": 10, "margin": 0}, {"num_tokens": 11}, {"": -1}),
    ],
}


def reward(key, weight=1.0, **options):
    [one] = chosen_part("reward", key, {key: options}).part
    return Reward(key, one.bound, weight)


@pytest.mark.parametrize("key", CASES)
def test_what_answers_are_worth(key):
    for options, sample, answers in CASES[key]:
        texts = list(answers)
        count = len(texts)
        found = Rewards([reward(key, **options)])(["?"] * count, texts, [sample] * count)
        assert found[0].tolist() == list(answers.values()), (options, sample)


def test_a_judge_elsewhere_is_asked():
    asked = []

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body["messages"][0]["content"])
            answer = asked[-1].rpartition("Answer:\n")[2]
            said = {"7": "10", "8": "no idea", "9": "8/10", "6": "I give 8 out of 10."}[answer]
            reply = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *given):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        found = Rewards([reward("remote", url=url)])(["2+5?"] * 4, [*"7896"], [DIGIT] * 4)
    finally:
        server.shutdown()
        server.server_close()
    assert found[0, [0, 2, 3]].tolist() == [1, 0.8, 0.8] and torch.isnan(found[0, 1])
    assert all("2+5?" in one and "Right answer:\n7" in one for one in asked)


def test_a_pattern_that_searches_for_ever_says_nothing():
    began = time.monotonic()
    part = reward("format", pattern=r"(a|aa)+$")
    found = Rewards([part])([""], ["a" * 4000 + "b"], [{}])
    assert found.isnan().all() or found[0, 0] == 0
    assert time.monotonic() - began < 20
    with pytest.raises(UserError, match="is not a regular expression"):
        Rewards([reward("format", pattern="(")])([""], ["a"], [{}])


def test_what_is_late_does_not_depend_on_how_long_answers_take(monkeypatch):
    """Count only calls; a component is never called twice at a time, whatever waits for it."""
    at_work, most, asked, now = [], [], [], [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("stageline.training.rewards.time", clock)

    def part(prompts, completions, samples):
        at_work.append(1)
        most.append(len(at_work))
        now[0] += 1
        asked.append(list(completions))
        at_work.pop()
        return [float(text) for text in completions]

    rewards = Rewards(
        [Reward("lots", part, takes_lots=True), Reward("steps", lambda p, c, s: [0.0] * len(c))],
        timeout=2.5,
    )
    first, second = rewards.begin(), rewards.begin()
    first.add(["", ""], ["1", "2"], [{}, {}])
    second.add([""], ["4"], [{}])
    while first._works[0].seconds != 1:
        time.sleep(0.001)
    now[0] += 100  # the next answers take that long
    first.add([""], ["3"], [{}])
    assert second.result().tolist() == [[4], [0]], "and those before, which it waits for"
    assert first.result().tolist() == [[1, 2, 3], [0, 0, 0]]
    assert first.num_late == second.num_late == 0 and max(most) == 1
    assert asked == [["1", "2"], ["3"], ["4"]], "in order, a lot at a time"
    assert first.seconds == 2 and second.seconds == 1


def test_a_part_that_hangs_does_not_hold_up_the_next_step():
    release = threading.Event()
    hung = Reward("hung", lambda p, texts, s: texts == ["a"] and release.wait(30) or [1.0])
    rewards = Rewards([hung], timeout=0.1)
    first, second = rewards.begin(), rewards.begin()
    first.add([""], ["a"], [{}])
    second.add([""], ["b"], [{}])
    assert second.result().tolist() == [[1.0]] and second.num_late == 0
    assert torch.isnan(first.result()).all() and first.num_late == 1
    release.set()


def raises(prompts, completions, samples):
    raise KeyError("depth")


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        (raises, r"the reward raises \(tests/shelf/test_rewards.py:\d+\) raised KeyError: 'depth'"),
        (lambda p, c, s: [1.0], r"test_rewards.py:\d+\) returned 1 rewards for 2 answers"),
        (lambda p, c, s: 1.0, "returned a float: 1.0. A list with one"),
        (lambda p, c, s: [1.0, "good"], "among its rewards"),
        (lambda p, c, s: [1.0, float("nan")], "among its rewards"),
        (lambda p, c: [1.0, 1.0], "has the signature"),
    ],
)
def test_a_broken_reward_names_itself(part, wanted):
    with pytest.raises(UserError, match=wanted):
        Rewards([Reward("mine", part)])(["a", "b"], ["c", "d"], [{}, {}])


def test_a_row_without_an_answer_is_named():
    with pytest.raises(DataError, match=re.escape("sample rows.jsonl:3 has neither `answer`")):
        Rewards([reward("exact_answer")])([""], ["x"], [{"source": "rows.jsonl:3"}])


def test_every_shipped_reward_is_seen_here():
    others = {"remote"}
    others |= {"reward_model"}  # tests/unit/test_reward_model.py
    others |= {"environment"}  # tests/unit/test_turns.py
    assert set(reward_register) == {*CASES, *others}


def test_several_rewards_with_options_are_read_and_read_again(tmp_path):
    words = (
        "--train-model llama --config-path . --dataset digits --collate-fn grpo "
        "--rollouts.group_size 4 "
        "--reward number,format --reward.number.tolerance 0.5 --rollouts.reward_weights 1,0.2"
    ).split()
    given = parse_train_args(words)
    save_config(given, tmp_path / "config.yaml")
    again = parse_train_args(["--config", str(tmp_path / "config.yaml")])
    assert again.as_config() == given.as_config()
    rewards = make_rewards(again)
    assert rewards.weights == [1, 0.2] and [one.key for one in rewards.parts] == [
        "number",
        "format",
    ]
    found = rewards(["?"], ["7.5"], [DIGIT])
    assert found.tolist() == [[1], [0]]
