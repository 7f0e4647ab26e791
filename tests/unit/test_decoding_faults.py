"""Faults of one request must not touch another: failing passes, NaN, wrong requests, the end.

The expected answers of all other requests are those of transformers.
"""

import contextlib
import threading

import pytest
import torch

import pp_models  # noqa: F401 (puts the parts on the shelf)
from stageline.errors import UserError
from stageline.inference.decoding.answer import AnswerText
from stageline.inference.decoding.cache import GroupCache
from stageline.inference.decoding.request import AnswerPiece, EngineError, Failed, Finished
from tests.helpers.decoded_models import decoded_text_model
from tests.helpers.decoding_engines import answer_all, llama_engine, request_of

NUM_TOKENS = 8
SECONDS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return decoded_text_model("llama", folder, num_prompts=6, num_tokens=NUM_TOKENS)


@contextlib.contextmanager
def failing(target, name, error, *, at):
    """Make a method raise in its call number `at`."""
    method, calls = getattr(target, name), iter(range(10**6))

    def called(*args, **kwargs):
        if next(calls) == at:
            raise error
        return method(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, called)
        yield
    assert next(calls) > at, "nothing was raised"


# -- passes that fail ------------------------------------------------------------------------


# the first prompts, a step, prompts that come into a group that runs
@pytest.mark.parametrize(("stage", "at"), [(0, 0), (1, 3), (1, 5)])
def test_a_pass_that_fails_ends_its_rows_alone(model, stage, at, capfd):
    error = torch.OutOfMemoryError("no room") if at else RuntimeError("boom")
    engine = llama_engine(model, 2, num_groups=2)
    part = engine.chain.decoders[stage].stage
    own = [module for index, module in part.layer_list() if index in part.layers][-1]
    with failing(own.mlp, "forward", error, at=at):
        failed = answer_all(engine, model)
    assert 1 <= len(failed) <= 3
    for told in failed.values():
        assert isinstance(told, EngineError)
        assert str(told) == f"stage {stage}: {type(error).__name__}: {error}"
    assert answer_all(engine, model) == {}, "the engine is as before"
    assert type(error).__name__ in capfd.readouterr().err


def test_groups_that_cannot_become_one_fail_both(model):
    """The order that joins them carries a step of the rows of both."""
    engine = llama_engine(model, 2, max_rows=6, num_groups=None)
    # groups for each number of rows; shorter answers end first
    engine._scheduler.best_groups = lambda num_rows: 3 if num_rows > 4 else 1
    requests = [request_of(model, i, max_new_tokens=2 + i) for i in range(6)]
    with failing(GroupCache, "join", torch.OutOfMemoryError("no room"), at=0):
        found = list(engine.answer(requests))
    failed = [one.error for one in found if isinstance(one, Failed)]
    assert len(found) == 6 and len(failed) >= 2
    assert all("no room" in str(error) for error in failed)
    assert answer_all(engine, model) == {}


@pytest.mark.parametrize("stage", [0, 1])
def test_a_row_without_numbers_fails_alone(model, stage, monkeypatch):
    """From stage 0 its keys are none either, and others take its place in the cache."""
    model_part = llama_engine(model, 2).chain.decoders[stage].stage
    forward, calls = model_part.forward, iter(range(10**6))

    def spoil(*args, **kwargs):
        output = forward(*args, **kwargs)
        if next(calls) in (2, 5):
            output[-1] = torch.nan
        return output

    engine = llama_engine(model, 2)
    with monkeypatch.context() as patch:
        patch.setattr(model_part, "forward", spoil)
        failed = answer_all(engine, model)
    assert len(failed) == 2
    assert all("nan" in str(error) for error in failed.values())
    assert answer_all(engine, model) == {}


# -- requests --------------------------------------------------------------------------------


class Ears:
    """Runs an engine in a thread and records its events."""

    def __init__(self, engine):
        self.engine = engine
        self.events = {}
        self.then = {}  # (key, number of the event) -> what is done in the engine's thread
        self.error = None
        self._ended = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.engine.run()
        except BaseException as error:
            self.error = error

    def submit(self, request):
        self.engine.submit(request, self.hear)

    def hear(self, event):
        with self._ended:
            heard = self.events.setdefault(event.key, [])
            heard.append(event)
            self._ended.notify_all()
        self.then.get((event.key, len(heard)), lambda: None)()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.engine.stop()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def ends(self, *keys):
        def are_over():
            return all(not isinstance(self.events.get(key, [AnswerPiece])[-1], AnswerPiece) and
                       key in self.events for key in keys)  # fmt: skip

        with self._ended:
            assert self._ended.wait_for(are_over, SECONDS), self.events
        for key in keys:
            *before, end = self.events[key]
            assert all(isinstance(event, AnswerPiece) for event in before)
            if isinstance(end, Finished):
                assert "".join(event.text for event in before) == end.text
        return [self.events[key][-1] for key in keys]


def test_cancelled_requests_end_and_others_go_on(model):
    """Cancel while it waits, during a pass, twice, after its end, and with unknown keys."""
    engine = llama_engine(model, max_rows=2)
    ears = Ears(engine)
    ears.then["0", 1] = lambda: [engine.cancel(key) for key in ("0", "5", "5", "nobody")]
    ears.then["1", 2] = lambda: engine.cancel("0")
    for place in range(6):
        ears.submit(request_of(model, place))
    with ears:
        ends = ears.ends(*"012345")
        engine.cancel("3")
        ears.submit(request_of(model, 3, "again"))
        (again,) = ears.ends("again")
    assert [end.reason for end in ends] == ["cancelled", *["length"] * 4, "cancelled"]
    assert 1 <= len(ends[0].token_ids) <= 3 and ends[5].token_ids == ()
    assert ends[0].token_ids == model.answers[0][: len(ends[0].token_ids)]
    assert [end.token_ids for end in ends[1:5]] == list(model.answers[1:5])
    assert again.token_ids == model.answers[3]


def test_a_key_that_runs_is_refused_and_the_first_goes_on(model):
    engine = llama_engine(model)
    requests = [request_of(model, 0, "same"), request_of(model, 1, "same"), request_of(model, 2)]
    found = list(engine.answer(requests))
    failed = [one for one in found if isinstance(one, Failed)]
    assert len(found) == 3 and len(failed) == 1
    assert isinstance(failed[0].error, UserError) and "'same' runs already" in str(failed[0].error)
    answers = {one.key: one.token_ids for one in found if isinstance(one, Finished)}
    assert answers == {"same": model.answers[0], "2": model.answers[2]}


def test_a_prompt_that_is_too_long_is_the_users_error(model):
    lengths = [one["input_ids"].shape[1] for one in model.prompts]
    longest, place = max(lengths), lengths.index(max(lengths))
    engine = llama_engine(model, max_length=longest)
    with pytest.raises(UserError, match=f"has {longest} tokens"):
        engine.submit(request_of(model, place), lambda event: None)
    found = {one.key: one for one in engine.answer(request_of(model, i) for i in range(6))}
    assert isinstance(found[str(place)].error, UserError)
    assert sum(isinstance(one, Failed) for one in found.values()) == 1


def test_a_listener_that_raises_ends_its_own_request(model):
    engine = llama_engine(model)

    def raises(event):
        raise KeyError("a listener's fault")

    with Ears(engine) as ears:
        engine.submit(request_of(model, 0, "deaf"), raises)
        ears.submit(request_of(model, 1))
        assert ears.ends("1")[0].token_ids == model.answers[1]
    assert ears.error is None and engine.is_healthy and engine.stats().running == 0


def test_a_text_that_cannot_be_written_fails_alone(model):
    engine = llama_engine(model)
    with failing(AnswerText, "add", ValueError("no text"), at=7):
        failed = answer_all(engine, model)
    assert len(failed) == 1 and "can't be written: no text" in str(*failed.values())


# -- the engine's end ------------------------------------------------------------------------


def test_stop_fails_what_runs_and_waits(model):
    engine = llama_engine(model, 2, max_rows=2)
    ears = Ears(engine)
    ears.then["0", 1] = engine.stop
    for place in range(4):
        ears.submit(request_of(model, place))
    with ears:
        ends = ears.ends(*"0123")
    assert all(str(end.error) == "the engine was stopped" for end in ends)
    assert ears.error is None
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(request_of(model, 5), ears.hear)
    engine.close()
    assert not engine.chain.num_in_flight


def test_a_chain_that_breaks_fails_all_and_says_so(model):
    engine = llama_engine(model, max_rows=2)
    ears = Ears(engine)
    with failing(engine.chain, "start", ConnectionError("rank 1 is gone"), at=3):
        for place in range(4):
            ears.submit(request_of(model, place))
        with ears:
            ends = ears.ends(*"0123")
    assert all("broke down: rank 1 is gone" in str(end.error) for end in ends)
    assert isinstance(ears.error, ConnectionError) and not engine.stats().is_healthy
    with pytest.raises(EngineError):
        engine.submit(request_of(model, 5), ears.hear)
