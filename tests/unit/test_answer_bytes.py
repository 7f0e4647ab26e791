"""The estimated cache of generation equals the real one; the estimated peak bounds the real one."""

import functools

import pytest
import torch

from loss_fn import sft
from pp_models import class_of_key
from prompt_fn import auto, chat
from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.answer_groups import (
    AnswerGroups,
    AnswerLoad,
    PromptToAnswer,
    answer_cost,
)
from stageline.inference.decoding.chain import LocalChain
from stageline.inference.decoding.request import Sampling
from stageline.inference.decoding.stage_decoder import StageDecoder, answering
from stageline.modules.methods import Methods
from stageline.modules.quantised import Quantization
from stageline.pipeline.live_bytes import PeakBytes
from stageline.planner.estimate import (
    META,
    Workload,
    answering_costs,
    estimate,
    measure,
    outline_of,
)
from tests.helpers import decoded_models
from tests.helpers.pictured_prompts import pictured_prompts
from tests.helpers.tiny_batches import tiny_micro_batches

CPU = torch.device("cpu")
COPIES, ANSWER = 3, 40
# with two lots at once: full ones, and with prompts of several lengths one that is not full
LENGTHS = {"even": [40] * 6, "mixed": [40, 9, 17, 23, 40]}


class Watched(StageDecoder):
    """A decoder that records the most bytes that the caches of all groups have after an order."""

    most = 0

    def run(self, order, tensors):
        found = super().run(order, tensors)
        self.most = max(self.most, sum(one.cache.num_bytes() for one in self.groups.values()))
        return found


@functools.cache
def tiny_model(family, folder):
    if family != "internvl":
        return decoded_models.decoded_text_model(family, folder, num_prompts=1, num_tokens=8)
    encode = functools.partial(pictured_prompts, prompt_fn=chat, image_token=auto)
    return decoded_models.decoded_vision_model(family, folder, encode=encode, num_tokens=12)


@pytest.fixture
def model(family, tmp_path_factory):
    return tiny_model(family, tmp_path_factory.getbasetemp() / family)


def maker(model, **options):
    paths = {"config_path": str(model.folder), "processor_path": None, "checkpoint_path": None}

    def make(**kwargs):
        return class_of_key(model.family).build(**paths, is_piece=True, **options, **kwargs)[0]

    return make


def load_of(prompts, *, lots_at_once, lot_size=4):
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    return AnswerLoad(len(prompts), COPIES, lot_size, lots_at_once, longest, ANSWER)


def really_drawn(model, stages, load, prompts):
    """Decoders that have noted their caches, and the peak of all tensors; no answer ends early."""
    decoders = [Watched(stage, trains_on=True) for stage in stages]
    groups = AnswerGroups(
        LocalChain(decoders),
        tokenizer=get_tokenizer(model.processor),
        stop_ids=(),
        device=CPU,
        lots_at_once=load.lots_at_once,
        most_on_way=4,
    )
    seeds = [tuple(range(place, place + COPIES)) for place in range(len(prompts))]
    asked = [PromptToAnswer(one, own) for one, own in zip(prompts, seeds, strict=True)]
    watch = PeakBytes(CPU)
    with answering(stages), watch.watch():
        groups.draw(asked, Sampling(max_new_tokens=ANSWER, temperature=1.0), lot_size=load.lot_size)
    return decoders, watch.peak


@pytest.mark.parametrize(("family", "lengths"), [("gemma3", "even"), ("mixtral", "mixed")])
def test_real_answers_take_what_is_stated(model, lengths):
    make = maker(model)
    prompts = decoded_models.text_prompts(LENGTHS[lengths], vocab_size=64)
    load = load_of(prompts, lots_at_once=2)
    stated = answer_cost(make(stage=0, num_stages=1, device=META), [load])
    stage = make(stage=0, num_stages=1, device=CPU)
    [decoder], peak = really_drawn(model, [stage], load, prompts)
    assert decoder.most == stated.cache
    assert 0.8 * (stated.cache + stated.answering) < peak <= stated.cache + stated.answering
    window = getattr(stage.config.get_text_config(), "sliding_window", None)
    if model.family == "gemma3":
        assert window < load.prompt_tokens, "layers with a window keep all columns here"


@pytest.mark.parametrize("family", ["internvl"])
def test_stages_are_the_sum_of_their_items(model):
    """Compare the planner's costs with what decoders hold, for prompts with images."""
    make = maker(model)
    outline = outline_of(make)
    prompts = (*model.prompts, model.prompts[2])
    batch = tiny_micro_batches(model.family, lengths=(20,))[0]
    load = load_of(prompts, lots_at_once=1)
    workload = Workload(batch, lambda last: functools.partial(sft, num_targets=1), CPU, repeats=1)
    stages = [make(stage=index, num_stages=2, partition=[1, 3], device=CPU) for index in range(2)]
    decoders, peak = really_drawn(model, stages, load, prompts)
    for costs in (estimate(outline, shape=(2, 20)), measure(outline, workload)):
        assert not any(stage.cache or stage.answering for stage in costs.stages([1, 3]))
        found = answering_costs(costs, outline, functools.partial(answer_cost, loads=[load]))
        assert found.not_counted == ""
        stated = found.stages([1, 3])
        assert [decoder.most for decoder in decoders] == [stage.cache for stage in stated]
        all_bytes = sum(stage.cache for stage in stated) + max(s.answering for s in stated)
        assert 0.7 * all_bytes < peak <= all_bytes


def test_answers_above_a_few_bit_base_take_the_same(tmp_path):
    """Counted on meta, where packed weights have other shapes; caches and passes have not."""
    model = tiny_model("mixtral", tmp_path)
    load = load_of(decoded_models.text_prompts([40, 9], vocab_size=64), lots_at_once=1)
    found = []
    for kind in (None, "nf4", "int8"):
        methods = Methods(quantization=Quantization(kind) if kind else None)
        outline = outline_of(maker(model, methods=methods, llm_lora_num=1))
        weigh = functools.partial(answer_cost, loads=[load])
        costs = answering_costs(estimate(outline, shape=(2, 20)), outline, weigh)
        assert costs.not_counted == ""
        found.append([(layer.cache, layer.answering) for layer in costs.layers])
    assert found[0] == found[1] == found[2]
