"""The answers of an engine to rendered prompts: each has a seed of its own."""

from models.generate import engine_answers
from stageline.data.text.rendered import Piece, Rendered
from stageline.inference.decoding.request import Finished, Sampling
from tests.helpers.tiny_models import tiny_tokenizer


class Recorder:
    """An engine that answers nothing, and records how it was called."""

    def __init__(self):
        self.seeds = {}

    def answer(self, requests):
        for request in requests:
            self.seeds[request.key] = request.sampling.seed
            yield Finished(request.key, "length", 1, 0, "", ())


def _seeds(prompts, **sampling):
    engine = Recorder()
    images = [None] * len(prompts)
    options = {"prompts": prompts, "images": images, "sampling": Sampling(**sampling)}
    found = dict(engine_answers(engine, tiny_tokenizer(), **options))
    assert sorted(found) == list(range(len(prompts)))
    return [engine.seeds[str(place)] for place in range(len(prompts))]


def test_sampled_answers_have_seeds_of_their_own_wherever_they_stand():
    texts = ["yes", "no", "yes"]
    names = ["a", "b", "c"]
    prompts = [Rendered((Piece(text),), name=name) for text, name in zip(texts, names, strict=True)]
    seeds = _seeds(prompts, temperature=1.0, seed=3)
    assert len(set(seeds)) == 3
    assert _seeds(prompts[::-1], temperature=1.0, seed=3) == seeds[::-1]
    assert _seeds(prompts[1:2], temperature=0.5, seed=3) == seeds[1:2]
    assert not set(_seeds(prompts, temperature=1.0, seed=4)) & set(seeds)


def test_the_likeliest_tokens_need_none():
    assert _seeds([Rendered((Piece("yes"),))] * 2, seed=3) == [3, 3]
