"""Orders and tensors between two real ranks on gloo."""

import math
import pickle

import torch

from stageline.inference.decoding.chain import BLOCK, make_wire
from stageline.inference.decoding.grammars import Grammar
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


def size_of(order):
    """Return bytes of its message, if no tensors go with it."""
    return len(pickle.dumps((order, [])))


SAMPLING = Sampling(
    temperature=0.7, logit_bias=((3, -100.0), (9, 0.5)), seed=2**64 - 1, logprobs=0,
    grammar=Grammar("regex", "a*"), stop_token_ids=(3, 4),
)  # fmt: skip


def made_orders():
    """Short ones, ones of just one block and one byte more, and a long one."""
    made = [
        PassOrder("tidy"),
        PassOrder("decode", number=2, rows=[5], leave=[(0, 1)], join=[(1, 0)]),
    ]
    for length in (BLOCK - 8 - 1, BLOCK - 8, BLOCK - 8 + 1, 3 * BLOCK):
        one = PassOrder("decode", error="")
        one.error = "ü" + "x" * (length - size_of(one) - 60)
        while size_of(one) < length:
            one.error += "y"
        made.append(one)
    made.append(PassOrder("prefill", rows=list(range(4000)), lengths=[7] * 4000))
    logprobs = [None, TokenLogprob(3, -math.inf, ((3, -math.inf), (5, -0.5)))]
    row_errors = {1: (True, "why")}
    made.append(PassOrder("decode", settings=[SAMPLING], logprobs=logprobs, row_errors=row_errors))
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
    return [[repr(order), values] for order, values in found]


def test_orders_and_tensors_arrive_as_they_were_sent():
    found = run_ranks(talk, 2)[0]
    made = made_orders()
    assert {size_of(one) - (BLOCK - 8) for one in made} >= {-1, 0, 1}
    assert [text for text, _ in found[: len(made)]] == list(map(repr, made))
    assert all(values == {} for _, values in found[: len(made)])
    for text, values in found[len(made) :]:
        assert text == repr(PassOrder("prefill", number=9))
        expected = tensors()
        assert list(values) == list(expected), "their order is that in which extras are read"
        for name, value in expected.items():
            assert values[name].dtype == value.dtype and values[name].shape == value.shape
            assert torch.equal(values[name].nan_to_num(7), value.nan_to_num(7)), name
