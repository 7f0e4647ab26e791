"""Answers of several turns: tokens, masks and rewards as written down by hand."""

import pytest

from loss_fn import Calculator, calculated, environment
from stageline.data.batches.collate_part import EncodedSample
from stageline.data.batches.prompts import with_answer
from stageline.data.text.encode import Encoded
from stageline.errors import ContractError, DataError
from stageline.inference.decoding.answer_groups import SampledAnswer
from stageline.inference.decoding.request import Sampling
from stageline.training.rollouts import AnswerRow
from stageline.training.turns import Episodes, MessageTokens

END = 2
LETTERS = {"<calc>2*(3+4)</calc>": [10, 11, END], "it is 14": [12, END], "it is 15": [13]}


class Letters:
    """A tokenizer of one token a letter."""

    def encode(self, text, add_special_tokens):
        return [100 + ord(one) for one in text]

    def decode(self, ids):
        return {END: "</s>"}[ids[0]]


def episodes_of(said, make=Calculator, render=None, **options):
    """Return what draws these completions, a list a turn, and the prompts of each turn."""
    seen, turns = [], iter(said)

    def draw(prompts, seeds, sampling, *, lot_size):
        seen.append([one.whole[0].input_ids for one in prompts])
        texts = iter(next(turns))
        return [
            [
                SampledAnswer(list(LETTERS[text]), [-0.5] * len(LETTERS[text]), text)
                for text in (next(texts) for _ in own)
            ]
            for own in seeds
        ]

    tokens = MessageTokens(Letters(), render, (END,))
    given = {"shared": lambda value: value, "max_turns": 3, **options}
    return Episodes(draw, make, tokens, **given), seen


def prompt_for(answer="14"):
    row = with_answer(Encoded([1, 5], [False] * 2, [False] * 2), [0, 0])
    return EncodedSample(None, {"id": "a", "answer": answer}, [row], len(row), [row])


def draw(episodes, most=20):
    sampling = Sampling(max_new_tokens=most)
    return episodes([prompt_for()], [(1, 2)], sampling, lot_size=1)[0]


def test_only_the_tokens_that_the_model_drew_are_trained_on():
    call, right, wrong = LETTERS
    episodes, seen = episodes_of([[call, wrong], [right]])
    first, second = draw(episodes)
    assert first.token_ids == [10, 11, END, 149, 152, 12, END], "14 of the calculator between"
    assert first.is_own == [True, True, True, False, False, True, True]
    assert first.log_probs == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert first.turns == [call, "14", right] and first.text == right and first.reward == 1
    assert second.token_ids == [13] and second.reward == 0 and second.num_tokens == 1
    assert seen[1] == [[1, 5, 10, 11, END, 149, 152, 0]], "with a stand-in for the next answer"
    row = AnswerRow.of(0, prompt_for(), first, frozenset())
    [encoded] = row.encoded.rows
    assert encoded.input_ids == [1, 5, 10, 11, END, 149, 152, 12, END]
    assert encoded.is_target == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert row.predicted(0) == slice(1, 8)
    samples = [{"environment_reward": one.reward} for one in (first, second)]
    assert environment([], [], samples) == [1.0, 0.0]


def test_an_answer_ends_with_its_room_and_its_turns():
    call, right, _ = LETTERS
    for given, most in (({"max_turns": 1}, 20), ({}, 5), ({}, 4)):
        episodes, seen = episodes_of([[call, right], [right]], **given)
        first, _ = draw(episodes, most)
        assert first.token_ids == [10, 11, END] and first.reward == 0, "no context behind it"
        assert len(seen) == 1
    first, _ = draw(episodes_of([[call, right], [right]])[0], 6)
    assert first.token_ids == [10, 11, END, 149, 152, 12] and first.is_cut


def test_messages_stand_in_the_markup_of_the_template():
    call, right, _ = LETTERS

    def render(messages):
        return "".join(f"<{one['role']}>{one['content']}</s>" for one in messages) + "<assistant>"

    tokens = MessageTokens(Letters(), render, (END,))
    told = [{"role": "tool", "content": "14"}]
    text = "<tool>14</s><assistant>"
    assert tokens(told, END) == [100 + ord(one) for one in text]
    assert tokens(told, 13) == [100 + ord(one) for one in f"</s>{text}"], "cut by a stop string"


def test_a_calculator_computes_and_executes_nothing():
    assert [calculated(one) for one in ("2*(3+4)", "-7/2", " 1.5 * 2 ")] == ["14", "-3.5", "3"]
    for text in ("2**9", "f()", "1/0", "a", "", "1,2", "'a'*9", "(" * 150, "1" * 201, "9e999"):
        with pytest.raises(DataError):
            calculated(text)
    one = Calculator(start="[", end="]")
    one.reset({"answer": "5"})
    assert one.step("[2**3]") == ([{"role": "tool", "content": "error"}], 0.0, False)
    with pytest.raises(ContractError, match="messages, reward, done"):
        wrong = type("Wrong", (Calculator,), {"step": lambda self, text: 1.0})
        draw(episodes_of([["it is 14"] * 2], wrong)[0])
