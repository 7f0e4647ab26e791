"""Orders and tensors between two real ranks on gloo, and orders as JSON."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.inference.decoding import request as orders
from stageline.inference.decoding.chain import BLOCK, make_wire
from stageline.inference.decoding.request import PassOrder, Sampling, TokenLogprob
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


def tensors():
    generator = torch.Generator().manual_seed(1)
    found = {}
    for dtype in DTYPES:
        values = torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        if dtype.is_floating_point:
            values[0, :3] = torch.tensor([math.nan, math.inf, -0.0])
        found[str(dtype)[6:]] = values
    found["turned"] = torch.arange(6.0).reshape(2, 3).T  # not contiguous
    found["nothing"] = torch.empty(0, 4, dtype=torch.int64)
    found["number"] = torch.tensor(7)
    return found


def made_orders():
    """Short ones, ones of just one block and one byte more, and a long one."""
    made = [
        PassOrder("tidy"),
        PassOrder("decode", number=2, rows=[5], leave=[(0, 1)], join=[(1, 0)]),
    ]
    for length in (BLOCK - 8 - 1, BLOCK - 8, BLOCK - 8 + 1, 3 * BLOCK):
        one = PassOrder("decode", error="")
        one.error = "ü" + "x" * (length - len((one.as_json() + "\n[]").encode()) - 60)
        while len((one.as_json() + "\n[]").encode()) < length:
            one.error += "y"
        made.append(one)
    made.append(PassOrder("prefill", rows=list(range(4000)), lengths=[7] * 4000))
    return made


def talk(rank):
    """Rank 0 sends all and gets back what rank 1 received."""
    wire = make_wire(rank, num_stages=2, device=CPU)
    sent = [(one, {}) for one in made_orders()] + [(PassOrder("prefill", number=9), tensors())] * 3
    if rank == 1:
        for _ in sent:
            wire.send(0, *wire.receive(0))
        wire.flush()
        return []
    for order, values in sent:  # more than are kept: those before have arrived
        wire.send(1, order, values)
    found = [wire.receive(1) for _ in sent]
    wire.flush()
    return [[order.as_json(), values] for order, values in found]


def test_orders_and_tensors_arrive_as_they_were_sent():
    found = run_ranks(talk, 2)[0]
    texts = [one.as_json() for one in made_orders()]
    assert {len((text + "\n[]").encode()) - (BLOCK - 8) for text in texts} >= {-1, 0, 1}
    assert [text for text, _ in found[: len(texts)]] == texts
    assert all(values == {} for _, values in found[: len(texts)])
    for text, values in found[len(texts) :]:
        assert PassOrder.of_json(text) == PassOrder("prefill", number=9)
        expected = tensors()
        assert list(values) == list(expected), "their order is that in which extras are read"
        for name, value in expected.items():
            assert values[name].dtype == value.dtype and values[name].shape == value.shape
            assert torch.equal(values[name].nan_to_num(7), value.nan_to_num(7)), name


numbers = st.integers(0, 2**31)
chosen = st.builds(
    TokenLogprob,
    numbers,
    st.floats(allow_nan=False),
    st.lists(st.tuples(numbers, st.floats(allow_nan=False)), max_size=3).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(
    order=st.builds(
        PassOrder,
        st.sampled_from(["prefill", "decode", "score", "measure", "tidy", "stop"]),
        number=numbers,
        group=st.integers(-1, 5),
        rows=st.lists(numbers, max_size=5),
        lengths=st.lists(numbers, max_size=5),
        leave=st.lists(st.tuples(st.integers(-1, 5), numbers).map(list), max_size=3),
        seconds=st.lists(st.floats(0, 10), max_size=3),
        error=st.none() | st.text(min_size=1),
        tokens=st.lists(numbers, max_size=5),
        row_errors=st.dictionaries(
            numbers.map(str), st.tuples(st.booleans(), st.text()).map(list), max_size=2
        ),
        scores=st.lists(
            st.tuples(st.lists(st.floats(-9, 0), max_size=3), st.booleans()).map(list), max_size=2
        ),
    ),
    logprobs=st.lists(st.none() | chosen, max_size=4),
)
def test_an_order_comes_out_of_its_text(order, logprobs):
    order.logprobs = [orders.logprob_as_json(one) for one in logprobs]
    found = PassOrder.of_json(order.as_json())
    assert [orders.logprob_of_json(one) for one in found.logprobs] == logprobs
    order.logprobs = found.logprobs = []
    assert found == order


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**64 - 1, logprobs=0),
        Sampling(logit_bias=((3, -100.0), (9, 0.5)), presence_penalty=-2.0, frequency_penalty=2.0),
        Sampling(repetition_penalty=1.3, logprobs=4),
    ],
)
def test_settings_come_out_of_their_text(sampling):
    order = PassOrder("prefill", settings=[orders.settings_of(sampling)])
    (told,) = PassOrder.of_json(order.as_json()).settings
    assert orders.sampling_of(told) == sampling


def test_what_the_last_stage_does_not_need_does_not_travel():
    sampling = Sampling(max_new_tokens=9, stop=("secret",), stop_token_ids=(4,))
    assert orders.settings_of(sampling) == {}
