"""Groups of answers for training: which are drawn, their advantages, stages left as found."""

import functools
import threading

import pytest
import torch
from torch.nn import functional

import pp_models  # noqa: F401 (puts the parts on the shelf)
from prompt_fn import auto, chat
from register import train_model_register
from stageline.data.text.processor import get_tokenizer
from stageline.errors import UserError
from stageline.inference.decoding.answer_groups import AnswerGroups, PromptToAnswer, check_room
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.request import Sampling
from stageline.inference.decoding.stage_decoder import StageDecoder, answering
from stageline.seeds import derive_seed
from stageline.training.rewards import Reward, Rewards
from tests.helpers import decoded_models
from tests.helpers.decoding_engines import answers_of, built_stages, local_engine
from tests.helpers.pictured_prompts import pictured_prompts

MOST = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return decoded_models.decoded_text_model("llama", folder, num_prompts=5, num_tokens=MOST)


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    encode = functools.partial(pictured_prompts, prompt_fn=chat, image_token=auto)
    folder = tmp_path_factory.mktemp("internvl")
    options = {"encode": encode, "num_tokens": MOST}
    return decoded_models.decoded_vision_model("internvl", folder, **options)


def stages_of(model, num_stages, **options):
    key = "causal_lm" if model.family == "llama" else "vision_language"
    return built_stages(train_model_register[key], model.folder, num_stages, **options)


def seeded(prompts, count):
    return [
        PromptToAnswer(prompt, tuple(derive_seed(0, place, one) for one in range(count)))
        for place, prompt in enumerate(prompts)
    ]


def draw(model, stages, prompts, *, lot_size=2, stop_ids=(), orders=None, on_lot=None, **sampling):
    decoders = [StageDecoder(stage, trains_on=True) for stage in stages]
    chain = LocalChain(decoders)
    if orders is not None:
        start = chain.start
        chain.start = lambda order, tensors: (orders.append(order), start(order, tensors))
    groups = AnswerGroups(
        chain,
        tokenizer=get_tokenizer(model.processor),
        stop_ids=stop_ids,
        device=torch.device("cpu"),
        lots_at_once=2,
        most_on_way=4,
    )
    with answering(stages):
        sampled = Sampling(max_new_tokens=MOST, **sampling)
        found = groups.draw(prompts, sampled, lot_size=lot_size, on_lot=on_lot)
    assert not any(decoder.groups or decoder.sampled for decoder in decoders)
    return found


def tokens(found):
    return [[tuple(answer.token_ids) for answer in group] for group in found]


@pytest.mark.parametrize(("name", "num_stages"), [("llama", 2), ("internvl", 1)])
def test_the_likeliest_answers_are_the_librarys(name, num_stages, request):
    model, orders = request.getfixturevalue(name), []
    stages = stages_of(model, num_stages)
    found = draw(model, stages, seeded(model.prompts, 3), orders=orders, temperature=0.0)
    assert tokens(found) == [[answer] * 3 for answer in model.answers]
    read = [order for order in orders if order.kind == "prefill"]
    wanted = [2, 2, 1] if name == "llama" else [1] * len(model.prompts)
    assert [len(order.lengths) for order in read] == wanted, "once, those without images by lots"
    assert all(answer.is_cut and not answer.text.isspace() for group in found for answer in group)


def test_rewards_judge_a_lot_while_the_next_is_drawn(llama):
    """In the order of prompts; a judge that waits for the last lot does not hold it up."""
    orders, told, goes_on = [], [], threading.Event()

    def judge(prompts, completions, samples):
        assert goes_on.wait(30), "nothing was drawn meanwhile"
        return [float(text) for text in completions]

    judging = Rewards([Reward("judge", judge, takes_lots=True)]).begin()

    def on_lot(first, answers):
        told.append((first, tokens(answers), len(orders)))
        names = [str(first + place) for place, group in enumerate(answers) for _ in group]
        judging.add(names, names, [{}] * len(names))
        if first == 4:
            goes_on.set()

    prompts = seeded(llama.prompts, 3)
    found = draw(llama, stages_of(llama, 2), prompts, orders=orders, on_lot=on_lot)
    assert [first for first, *_ in told] == [0, 2, 4]
    assert [group for _, answers, _ in told for group in answers] == tokens(found)
    assert told[0][2] < len(orders) - MOST, "told while others are drawn"
    assert judging.result().tolist() == [[float(place) for place in range(5) for _ in range(3)]]


def test_drawn_answers_are_those_of_the_engine_and_know_their_probabilities(llama):
    """The same seeds through the server's engine, and one forward of the whole model."""
    prompts, count, heat = seeded(llama.prompts, 3), 3, 1.3
    stop = get_tokenizer(llama.processor)
    stop_ids = (next(token for token in llama.answers[0][1:]),)
    found = draw(llama, stages_of(llama, 2), prompts, stop_ids=stop_ids, temperature=heat)
    whole = decoded_models.load_whole(llama.folder)
    engine = local_engine(stages_of(llama, 1), llama.processor, num_groups=1)
    num_stopped = 0
    for prompt, group in zip(prompts, found, strict=True):
        for seed, answer in zip(prompt.seeds, group, strict=True):
            options = {"seed": seed, "temperature": heat, "max_new_tokens": MOST}
            [wanted] = answers_of(engine, [prompt.inputs], stop_token_ids=stop_ids, **options)
            ended = answer.token_ids[-1] in stop_ids
            assert tuple(answer.token_ids[: len(answer.token_ids) - ended]) == wanted
            assert answer.is_cut is not ended
            assert answer.text == stop.decode(wanted, skip_special_tokens=True)
            num_stopped += ended
            ids = torch.cat([prompt.inputs["input_ids"], torch.tensor([answer.token_ids])], dim=1)
            with torch.no_grad():
                logits = whole(ids).logits[0, -len(answer.token_ids) - 1 : -1] / heat
            every = functional.log_softmax(logits, dim=-1)
            right = every.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(answer.log_probs), right, rtol=0, atol=2e-5)
    assert 0 < num_stopped < 15 and count == len(found[0])
    other = draw(llama, stages_of(llama, 1), prompts, stop_ids=stop_ids, temperature=heat)
    assert found == other, "the number of stages changes nothing, to the bit"
    assert (
        draw(llama, stages_of(llama, 1), prompts[2:4], stop_ids=stop_ids, temperature=heat)
        == (found[2:4])
    ), "nor does what else is answered"


def gradients(stages, ids):
    for stage in stages:
        stage.zero_grad()
    hidden = ids
    for stage in stages:
        hidden = stage(hidden, attention_mask=torch.ones_like(ids))
    hidden.square().mean().backward()
    return {
        f"{stage.stage}/{name}": parameter.grad.clone()
        for stage in stages
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }


def test_stages_train_on_as_they_were_found(llama):
    stages = stages_of(
        llama, 2, llm_lora_num=1, gradient_checkpointing=True, logits_chunk=4, lora_dropout=0.0
    )
    assert all(stage.can_decode for stage in stages)  # the call caches what a stage finds
    ids = llama.prompts[1]["input_ids"]
    before, states = gradients(stages, ids), [dict(vars(stage)) for stage in stages]
    modes = [[module.training for module in stage.modules()] for stage in stages]
    assert draw(llama, stages, seeded(llama.prompts, 2), temperature=1.0)
    assert [dict(vars(stage)) for stage in stages] == states
    assert [[module.training for module in stage.modules()] for stage in stages] == modes
    after = gradients(stages, ids)
    assert before.keys() == after.keys() and len(before) > 4
    for name, gradient in before.items():
        assert torch.equal(gradient, after[name]), name


def test_answers_stay_where_frequencies_are_those_of_the_prompt():
    check_room(12, 8, 128, short_length=20)
    with pytest.raises(UserError, match="20 positions, before longer rows change .*LongRoPE"):
        check_room(13, 8, 128, short_length=20)
    with pytest.raises(UserError, match="has 20 positions"):
        check_room(13, 8, 20)
