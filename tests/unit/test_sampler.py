"""The choice of tokens, against transformers' processors and by distribution, single and mixed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from stageline.errors import UserError
from stageline.inference.decoding.request import Sampling
from stageline.inference.decoding.sampler import SampledRow, choose, draw, token_weights

INF = float("inf")


def _logits(num_rows: int, size: int, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, size, generator=generator) * spread


def _row(*, prompt=(), answer=(), **settings_) -> SampledRow:
    ids = torch.tensor([prompt], dtype=torch.long)
    return SampledRow(Sampling(**settings_), ids, list(answer))


def _pick(logits_V: torch.Tensor, **options) -> int:
    chosen = choose(logits_V[None], [_row(**options)])[0]
    assert chosen.error is None
    return chosen.token_id


def _warped(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return transformers' probabilities, by the classes that its `generate` uses, in its order."""
    warpers = [hf.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(hf.MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 40},
        {"top_p": 0.9, "temperature": 4.0},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 100, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_kept_tokens_and_probabilities_are_those_of_transformers(options):
    scores = _logits(5, 3000, spread=2.0)
    sampling = Sampling(**{"temperature": 1.0, **options})
    weights = token_weights(scores, [sampling] * 5)
    expected = _warped(scores, sampling)
    assert torch.equal(weights > 0, expected > 0)
    found = weights.double() / weights.double().sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected.double(), atol=1e-7, rtol=1e-5)


def test_rows_with_different_settings_have_their_own_weights():
    scores = _logits(4, 501)  # odd: rows begin at odd places in memory
    samplings = [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, top_k=7),
        Sampling(temperature=2.0, top_p=0.5),
        Sampling(temperature=1.0, top_k=30, min_p=0.1),
    ]
    together = token_weights(scores, samplings)
    alone = [token_weights(scores[i : i + 1], [s]) for i, s in enumerate(samplings)]
    assert torch.equal(together, torch.cat(alone))


@given(
    size=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    options=st.fixed_dictionaries(
        {
            "temperature": st.floats(0.1, 5),
            "top_k": st.integers(0, 70),
            "top_p": st.floats(0, 1),
            "min_p": st.floats(0, 1),
        }
    ),
)
@settings(max_examples=30, deadline=None)
def test_kept_tokens_at_any_setting(size, seed, options):
    scores = _logits(1, size, seed=seed)
    sampling = Sampling(**options)
    found = token_weights(scores, [sampling])[0] > 0
    # rounding may move a limit that falls on a token: both results are right
    near = [
        _warped(scores, Sampling(**{**options, "top_p": p, "min_p": m}))[0] > 0
        for p in (max(sampling.top_p - 1e-5, 1e-9), min(sampling.top_p + 1e-5, 1.0))
        for m in (max(sampling.min_p - 1e-5, 0.0), min(sampling.min_p + 1e-5, 1.0))
    ]
    assert found.any()
    assert not (found & ~torch.stack(near).any(0)).any()
    # tokens that transformers surely keeps at the exact settings are here too
    surely = torch.stack(near).all(0) & (scores[0] - scores.max() > -20 * sampling.temperature)
    assert not (surely & ~found).any()


def test_equal_scores_stay_together():
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for options in ({"top_k": 2}, {"top_p": 0.6}):
        weights = token_weights(scores, [Sampling(temperature=1.0, **options)])
        assert (weights[0] > 0).tolist() == [True, True, True, True, False]


def test_the_penalties_are_those_of_transformers_over_prompt_and_answer():
    scores = _logits(1, 200)
    prompt, answer = [3, 5, 5, 250], [7, 3]  # 250: an image token that the head doesn't write
    ids = torch.tensor([prompt + answer])
    for penalty in (1.3, 5.0, 0.5):
        options = {"prompt": prompt, "answer": answer, "repetition_penalty": penalty}
        # the likeliest token is put among those that are penalised
        for top in (3, 5, 7, 9):
            raised = scores.clone()
            raised[0, top] = scores.max() * 1.2
            for lower in (0.0, 0.1, 3.0, 10.0):  # the penalty multiplies a negative value
                logits = raised - (raised.max() + lower if lower else 0.0)
                expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
                assert _pick(logits[0], **options) == expected.argmax().item()


def test_a_stop_may_come_from_the_least_number_of_tokens_on():
    logits = torch.tensor([0.0, 3.0, 1.0])
    for others in ({}, {"logit_bias": ((0, 0.5),)}):  # alone, and where more is changed
        options = {"min_new_tokens": 2, "stop_token_ids": (1,), **others}
        found = [_pick(logits, answer=[0] * count, **options) for count in range(4)]
        assert found == [2, 2, 1, 1]


def test_presence_frequency_and_bias_are_those_of_the_formula_of_openai():
    logits = torch.tensor([1.0, 1.9, 1.5, 0.0])
    answer = [1, 1, 2]
    assert _pick(logits, answer=answer) == 1
    # 1: 1.9 - 2 * 0.3; 2: 1.5 - 0.3; 0: 1.0
    assert _pick(logits, answer=answer, frequency_penalty=0.3) == 1
    assert _pick(logits, answer=answer, frequency_penalty=0.45) == 2
    assert _pick(logits, answer=answer, frequency_penalty=0.6) == 0
    assert _pick(logits, answer=answer, presence_penalty=0.8) == 1
    assert _pick(logits, answer=answer, presence_penalty=1.0) == 0
    # the penalty counts only tokens of the answer
    assert _pick(logits, prompt=answer, presence_penalty=1.0) == 1
    assert _pick(logits, logit_bias=((1, -100.0), (3, 1.6))) == 3
    assert _pick(logits, logit_bias=((3, 1.0), (3, 1.0))) == 3


def test_draws_follow_the_distribution():
    """Chi-square over 10000 seeds at 12 tokens: 0.999 of right samplers stay below the mark."""
    logits = _logits(1, 12, spread=1.5)
    sampling = {"temperature": 0.8, "top_k": 10, "top_p": 0.97}
    rows = [_row(seed=seed, **sampling) for seed in range(10000)]
    tokens = [c.token_id for c in choose(logits.expand(len(rows), -1), rows)]
    expected = _warped(logits, Sampling(**sampling))[0].double().numpy() * len(rows)
    counts = np.bincount(tokens, minlength=12)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    freedom = kept.sum() - 1
    distance = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert 5 <= freedom and distance < freedom + 3.1 * (2 * freedom) ** 0.5 + 6


def test_numbers_of_a_row_follow_from_its_seed_and_are_even_and_independent():
    rows = [_row(seed=seed) for seed in range(100)]
    numbers = np.array([[row.next_number() for _ in range(100)] for row in rows])
    again = _row(seed=7)
    assert [again.next_number() for _ in range(100)] == numbers[7].tolist()
    assert 0 <= numbers.min() and numbers.max() < 1 and len(np.unique(numbers)) == numbers.size
    counts = np.bincount((numbers * 20).astype(int).ravel(), minlength=20)
    assert ((counts - 500) ** 2 / 500).sum() < 46  # chi-square, 19 degrees: 0.0005
    for neighbours in (numbers[1:] - numbers[:-1], numbers[:, 1:] - numbers[:, :-1]):
        assert abs(neighbours.var() - 1 / 6) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_token_and_logprobs_alone_and_in_any_batch(dtype):
    num_rows, size = 23, 5001  # an odd size: rows begin at odd places in memory
    logits = _logits(num_rows, size).to(dtype)
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.7, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 50, "repetition_penalty": 1.2},
        {"temperature": 0.6, "min_p": 0.01, "presence_penalty": 1.0, "logit_bias": ((9, 2.0),)},
    ]

    def rows(order):
        options = [kinds[i % len(kinds)] for i in range(num_rows)]
        return [
            _row(prompt=[1, 2], answer=range(i), seed=i, logprobs=i % 4, **options[i])
            for i in order
        ]

    together = choose(logits, rows(range(num_rows)))
    assert len({chosen.token_id for chosen in together}) > 15
    for i in range(num_rows):
        assert choose(logits[i : i + 1].clone(), rows([i])) == [together[i]]
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).tolist()
    assert choose(logits[order], rows(order)) == [together[i] for i in order]


@pytest.mark.parametrize(
    ("heat", "size", "dtype"),
    [(0.0, 97, torch.float32), (1.0, 5000, torch.bfloat16), (0.7, 5000, torch.float32)],
)
def test_log_probs_of_a_training_are_exact_and_the_rows_own(heat, size, dtype):
    """Other rows change no bit of a row; an unusable row ends by itself."""
    logits = _logits(33, size, spread=5.0).to(dtype)
    logits[7, 3] = float("nan")

    def rows(places):
        options = {"temperature": heat, "logprobs": 0, "tempers_logprobs": True}
        return [_row(seed=i, **options) for i in places]

    together = choose(logits, rows(range(33)))
    assert [place for place, one in enumerate(together) if one.error is not None] == [7]
    few = [32, 0, 11]  # the last row takes the place of one that left
    assert choose(logits[few], rows(few)) == [together[i] for i in few]
    exact = (logits.double() / (heat or 1.0)).log_softmax(-1)
    for place, one in enumerate(together):
        if place != 7:
            assert one.logprob.token_id == one.token_id and one.logprob.top == ()
            assert abs(one.logprob.logprob - exact[place, one.token_id].item()) < 4e-6


def test_a_row_draws_one_number_a_token():
    """Numbers drawn ahead are those that one call each would give."""
    generator, row = torch.Generator().manual_seed(5), _row(seed=5)
    wanted = [torch.rand((), generator=generator, dtype=torch.float64).item() for _ in range(40)]
    assert [row.next_number() for _ in range(40)] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype):
    logits = _logits(1, 300).to(dtype)
    options = {"temperature": 2.0, "repetition_penalty": 3.0, "logit_bias": ((4, 5.0),)}
    found = choose(logits, [_row(prompt=[1], logprobs=3, **options)])[0]
    expected = logits[0].double().log_softmax(-1)
    assert found.logprob.token_id == found.token_id
    assert found.logprob.logprob == pytest.approx(expected[found.token_id].item(), abs=1e-5)
    values, ids = expected.topk(3)
    assert [i for i, _ in found.logprob.top] == ids.tolist()
    assert [p for _, p in found.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    none, zero = choose(logits.expand(2, -1), [_row(), _row(logprobs=0)])
    assert none.logprob is None and zero.logprob.top == ()
    # more than there are tokens: all
    assert len(choose(logits, [_row(logprobs=999)])[0].logprob.top) == 300


def test_ties_go_to_the_first_token():
    logits = torch.tensor([[1.0, 4.0, 4.0, -INF, 4.0]])
    chosen = choose(logits, [_row(logprobs=2)])[0]
    assert chosen.token_id == 1 and [i for i, _ in chosen.logprob.top] == [1, 2]
    # also where a penalty makes the tie
    assert _pick(torch.tensor([4.0, 2.0]), prompt=[0], repetition_penalty=2.0) == 0


@pytest.mark.parametrize("options", [{"temperature": 1e-6}, {"temperature": 5e-324}, {"top_p": 0}])
def test_settings_that_leave_one_token_are_greedy(options):
    logits = _logits(1, 400)[0]
    options = {"temperature": 3.0, **options}
    for seed in range(5):
        assert _pick(logits, seed=seed, **options) == logits.argmax().item()


def test_tokens_without_a_chance_are_never_drawn():
    logits = torch.full((2, 50), -INF)
    logits[:, [7, 30]] = 0.5
    rows = [_row(temperature=50.0, seed=s) for s in range(400)]
    tokens = {c.token_id for c in choose(logits[:1].expand(400, -1), rows)}
    assert tokens == {7, 30}
    # the ends of the range of numbers
    samplings = [Sampling(temperature=1.0)] * 2
    assert draw(logits, samplings, [0.0, 1 - 2.0**-53]) == [7, 30]


def test_a_broken_row_gets_its_error_and_the_others_their_tokens():
    logits = _logits(6, 40)
    logits[1, 3] = float("nan")
    logits[2] = -INF
    logits[3, 0] = INF
    for options in ({}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}):
        rows = [_row(**options) for _ in range(6)]
        rows[4] = _row(logit_bias=((40, 1.0),), **options)
        found = choose(logits, rows)
        assert [c.token_id == -1 for c in found] == [False, True, True, True, True, False]
        words = ["nan", "all logits of token 0", "inf", "logit_bias names token 40"]
        for chosen, word in zip(found[1:5], words, strict=True):
            assert word in str(chosen.error) and chosen.logprob is None
        assert isinstance(found[4].error, UserError)
        assert not any(isinstance(c.error, UserError) for c in found[1:4])
        for i in (0, 5):
            assert found[i] == choose(logits[i : i + 1], [_row(**options)])[0]
