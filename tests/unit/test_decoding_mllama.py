"""Mllama in pipelined decoding against transformers' generate, one sample at a time.

Layers 1 and 3 of 5 look at images, so a cut at 2 has one on each of two stages, and the last of
four stages has none.
"""

import functools

import pytest
import torch

import pp_models  # noqa: F401 (puts the parts on the shelf)
from prompt_fn import auto, chat
from register import train_model_register
from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.engine import DecodingEngine
from stageline.inference.decoding.request import Request, Sampling, ScoreRequest
from stageline.inference.decoding.scheduler import Limits
from stageline.inference.decoding.stage_decoder import StageDecoder, cells_within
from tests.helpers.decoded_models import decoded_vision_model, load_whole, text_prompts
from tests.helpers.decoding_engines import answers_of, built_stages, local_engine
from tests.helpers.pictured_prompts import pictured_prompts

NUM_TOKENS = 12
NUM_IMAGES = (1, 0, 2, 1, 0, 0)


def encode(processor):
    """Six prompts of several lengths with 0, 1 and 2 images of 1 to 4 tiles."""
    pictured = pictured_prompts(processor, prompt_fn=chat, image_token=auto)
    texts = text_prompts((3, 21), vocab_size=len(get_tokenizer(processor)), seed=3)
    return [*pictured, *texts]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mllama")
    made = decoded_vision_model("mllama", folder, encode=encode, num_tokens=NUM_TOKENS)
    counts = [one["aspect_ratio_ids"].shape[1] if "pixel_values" in one else 0
              for one in made.prompts]  # fmt: skip
    assert tuple(counts) == NUM_IMAGES
    return made


@functools.cache
def stages_of(folder, partition):
    build = train_model_register["mllama"]
    return built_stages(build, folder, len(partition), partition=list(partition))


def engine_of(model, partition, **limits):
    return local_engine(stages_of(model.folder, partition), model.processor, **limits)


def test_rows_with_and_without_images_answer_as_alone(model):
    engine = engine_of(model, (2, 1, 1, 1), max_rows=6, num_groups=1)
    assert answers_of(engine, model.prompts, max_new_tokens=NUM_TOKENS) == list(model.answers)


@pytest.mark.parametrize(("max_rows", "num_groups"), [(1, 1), (3, 2)])
def test_rows_join_and_leave(model, max_rows, num_groups):
    """Rows with images take the place of rows of text, and the other way round."""
    engine = engine_of(model, (2, 1, 2), max_rows=max_rows, num_groups=num_groups)
    places = [(3 * step + step // 6) % 6 for step in range(12)]
    lengths = [1 + 5 * step % NUM_TOKENS for step in range(12)]
    requests = [
        Request(str(step), model.prompts[place], Sampling(max_new_tokens=length, stop_token_ids=()))
        for step, (place, length) in enumerate(zip(places, lengths, strict=True))
    ]
    found = {answer.key: answer for answer in engine.answer(requests)}
    for step, (place, length) in enumerate(zip(places, lengths, strict=True)):
        assert found[str(step)].token_ids == model.answers[place][:length], (step, place)
    assert not any(decoder.groups for decoder in engine.chain.decoders)


def test_scores_equal_the_librarys(model):
    engine = engine_of(model, (2, 3), max_rows=4)
    whole = load_whole(model.folder)
    items = [ScoreRequest(str(i), one, 3) for i, one in enumerate(model.prompts[:4])]
    for scored in engine.score(items):
        prompt = model.prompts[int(scored.key)]
        with torch.no_grad():
            logprobs = whole(**prompt).logits[0, -4:-1].log_softmax(-1)
        expected = logprobs.gather(-1, prompt["input_ids"][0, -3:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=1e-4, atol=1e-5)


def test_images_count_in_the_cache(model):
    """A prompt is refused for its images, and those of others are read when there is room."""
    stages = stages_of(model.folder, (2, 3))
    decoders = [StageDecoder(stage) for stage in stages]
    need = [stages[0].fixed_cells(prompt) for prompt in model.prompts]
    tiles, patches = 4, 5  # a side has 16 pixels, a patch 8; one state more is for the whole image
    # on the first stage one layer of each kind: an image's column takes as much as a token
    assert need == [count * tiles * patches for count in NUM_IMAGES]
    token = 2 * 2 * 1 * 8 * 4  # layers, keys and values, heads, size, float32
    assert [decoder.bytes_of_a_token() for decoder in decoders] == [token // 2, token]
    assert cells_within(100 * token, decoders[1]) == 80
    lengths = [one["input_ids"].shape[1] for one in model.prompts]
    most = sorted(a + b for a, b in zip(lengths, need, strict=True))[-2] + 3
    chain, used = LocalChain(decoders), []
    engine = DecodingEngine(
        chain,
        tokenizer=get_tokenizer(model.processor),
        limits=Limits(max_rows=6, num_groups=1, max_cells=most),
        prompt_cells=stages[0].fixed_cells,
    )
    start = chain.start
    chain.start = lambda *order: (used.append(engine.stats().cache_cells), start(*order))
    sampling = Sampling(max_new_tokens=2, stop_token_ids=())
    requests = [Request(str(i), one, sampling) for i, one in enumerate(model.prompts)]
    found = {int(answer.key): answer for answer in engine.answer(requests)}
    assert most - 3 < max(used) <= most
    fullest = max(range(6), key=lambda place: lengths[place] + need[place])
    assert "images take as much room" in str(found.pop(fullest).error)
    assert len(found) == 5
    for place, answer in found.items():
        assert answer.token_ids == model.answers[place][:2]
