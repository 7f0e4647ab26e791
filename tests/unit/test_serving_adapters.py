"""Several adapters on one base: each answer is that of its own adapter, as in `peft`."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import pp_models  # noqa: F401 (puts the parts on the shelf)
from commands import serve, with_folders
from options.serve import named_adapters
from parse_args import parse_serve_args
from prompt_fn import auto, fill
from register import import_shelf, train_model_register
from stageline.checkpoint.adapter_start import attach_beside
from stageline.errors import UserError
from stageline.inference.decoding.request import Request, Sampling, Scored, ScoreRequest
from tests.helpers.decoded_models import decoded_text_model, decoded_vision_model, load_whole
from tests.helpers.decoding_engines import built_stages, local_engine, noted_orders
from tests.helpers.pictured_prompts import pictured_prompts
from tests.helpers.served_model import NUM_TOKENS, ServedModel, wait_for_url
from tests.helpers.small_run import ForkedRun
from tests.helpers.tiny_models import VISION_LANGUAGE

import_shelf("prompt_fn")
ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "red": {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "blue": {"r": 2, "lora_alpha": 16, "target_modules": "all-linear"},
    "dora": {"r": 3, "lora_alpha": 24, "target_modules": ["o_proj", "up_proj"], "use_dora": True},
}
NAMES = ("tiny", *KINDS)
QUESTIONS = ("Which digit is this?", "true or false", "The cat is left of the dog. yes?")


class Adapted:
    """A base, its adapters as `peft` saved them, and what `peft` answers with each."""

    def __init__(self, parent):
        self.base = ServedModel.save(parent, positions=256)
        self.folders = {name: str(parent / name) for name in KINDS}
        for seed, (name, kind) in enumerate(KINDS.items()):
            torch.manual_seed(seed)
            config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **kind)
            made = peft.get_peft_model(self._whole(), config)
            made.save_pretrained(self.folders[name])
        self.wholes = {"tiny": self._whole()} | {
            name: peft.PeftModel.from_pretrained(self._whole(), folder).eval()
            for name, folder in self.folders.items()
        }

    def _whole(self):
        return AutoModelForCausalLM.from_pretrained(self.base.folder, dtype=torch.float32).eval()

    def answer(self, name, question):
        return ServedModel(self.base.folder, self.wholes[name], self.base.tokenizer).answer(
            question
        )

    def tokens(self, name, ids, count):
        made = self.wholes[name].generate(
            input_ids=ids, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=[]
        )
        return tuple(made[0, ids.shape[1] :].tolist())

    def engine(self, num_stages, **limits):
        build = train_model_register["causal_lm"]
        stages = built_stages(build, self.base.folder, num_stages, is_piece=True)
        for stage in stages:
            attach_beside(stage, list(self.folders.values()))
        return local_engine(stages, self.base.tokenizer, **limits)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    return Adapted(tmp_path_factory.mktemp("adapted"))


def prompts(count):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    return [torch.randint(5, 60, (1, length), generator=generator) for length in lengths]


def test_rows_of_several_adapters_in_one_batch(adapted):
    engine = adapted.engine(2, max_rows=6, max_length=256, prefill_tokens=64)
    orders = noted_orders(engine)
    asked, expected = [], {}
    for place, ids in enumerate(prompts(8)):
        number = place % len(NAMES)
        count = 5 + place % 7  # rows come and go
        sampling = Sampling(max_new_tokens=count, stop_token_ids=())
        asked.append(Request(str(place), {"input_ids": ids}, sampling, number))
        expected[str(place)] = adapted.tokens(NAMES[number], ids, count)
    # keys and values of one adapter would be wrong for another
    for number, name in enumerate(NAMES):
        sampling = Sampling(max_new_tokens=20, stop_token_ids=())
        asked.append(Request(name, {"input_ids": ids}, sampling, number))
        expected[name] = adapted.tokens(name, ids, 20)
    assert len({expected[name] for name in NAMES}) == len(NAMES)
    found = {event.key: event.token_ids for event in engine.answer(asked)}
    assert found == expected
    assert any(len(set(order.adapters)) > 2 for order in orders if order.kind == "decode")
    assert any(len(set(order.adapters)) > 1 for order in orders if order.kind == "prefill")


@torch.no_grad()
def test_scores_are_those_of_the_adapter(adapted):
    engine = adapted.engine(2, max_rows=4, max_length=256)
    rows = prompts(8)
    asked = [
        ScoreRequest(str(place), {"input_ids": ids}, ids.shape[1] - 1, adapter=place % len(NAMES))
        for place, ids in enumerate(rows)
    ]
    for event in engine.score(asked):
        assert isinstance(event, Scored)
        place = int(event.key)
        ids = rows[place]
        logits = adapted.wholes[NAMES[place % len(NAMES)]](input_ids=ids).logits[0, :-1]
        wanted = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(event.logprobs), wanted, rtol=1e-4, atol=1e-4)


def test_rows_are_told_apart_where_a_model_puts_them_together(adapted):
    engine = adapted.engine(1, max_rows=2)
    stage = engine.chain.decoders[0].stage
    layer = next(
        one for name, one in stage.named_modules() if name.endswith("layers.0.mlp.up_proj")
    )
    x = torch.randn(3, 5, layer.in_features)
    layer.choice.begin([1, 2, 3])
    together = layer(x)
    assert torch.allclose(layer(x.flatten(0, 1)), together.flatten(0, 1), atol=1e-6)
    for row, number in enumerate([1, 2, 3]):
        layer.choice.begin([number])
        assert torch.allclose(layer(x[row : row + 1]), together[row : row + 1], atol=1e-5)
    layer.choice.begin([1, 2])
    with pytest.raises(AssertionError, match="has not 2 rows"):
        layer(x)


def test_a_server_of_several_adapters(adapted):
    adapters = ",".join(f"{name}={folder}" for name, folder in adapted.folders.items())
    words = [
        ROOT / "serve.py", "--model-path", adapted.base.folder, "--device", "cpu", "--port", 0,
        "--num-stages", 2, "--temperature", 0, "--max-new-tokens", NUM_TOKENS,
        "--num-groups", 1, "--adapter-path", adapters,
    ]  # fmt: skip
    run = ForkedRun([str(word) for word in words], ranks=2)
    url = f"{wait_for_url(run)}/v1"
    asked = [(name, question) for question in QUESTIONS for name in NAMES]

    def ask(pair):
        messages = [{"role": "user", "content": pair[1]}]
        body = {"model": pair[0], "messages": messages}
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
        assert answer["model"] == pair[0]
        return answer["choices"][0]["message"]["content"]

    try:
        with ThreadPoolExecutor(len(asked)) as pool:
            found = dict(zip(asked, pool.map(ask, asked), strict=True))
        assert found == {pair: adapted.answer(*pair) for pair in asked}
        assert len(set(found.values())) > len(QUESTIONS)
        cards = httpx.get(f"{url}/models").json()["data"]
        assert {card["id"]: card["parent"] for card in cards} == {
            "tiny": None, **dict.fromkeys(KINDS, "tiny"),
        }  # fmt: skip
        assert httpx.get(f"{url}/models/blue").json()["id"] == "blue"
        assert httpx.get(f"{url}/models/green").status_code == 404
        stream = {"model": "dora", "prompt": QUESTIONS[0], "stream": True, "max_tokens": 2}
        lines = httpx.post(f"{url}/completions", json=stream).text.split("\n\n")
        assert json.loads(lines[0].removeprefix("data: "))["model"] == "dora"
    finally:
        for pid in run.pids.values():
            os.kill(pid, signal.SIGTERM)
    assert run.wait(60).code == 143


def given(adapted, *words):
    return parse_serve_args(["--model-path", str(adapted.base.folder), *words]).run


def test_names_of_adapters(adapted):
    folder = adapted.folders["red"]
    run = given(adapted, "--adapter-path", f"a={folder},org/b.1={folder}")
    assert named_adapters(with_folders(run)) == {"a": folder, "org/b.1": folder}
    assert named_adapters(given(adapted, "--adapter-path", f"{folder},{folder}")) == {}
    with pytest.raises(UserError, match="which the base has too"):
        serve.make_settings(run, (), name="a", adapters=("a",))


@pytest.mark.parametrize(
    ("value", "words", "wanted"),
    [
        ("a={0},{0}", [], "Name each of them"),
        ("a=/nowhere/at/all", [], "no such file or folder"),
        ("a={0}", ["--merge-adapters", "true"], "without --merge-adapters"),
    ],
)
def test_adapters_that_cannot_be_told_apart(adapted, value, words, wanted):
    value = value.format(adapted.folders["red"])
    with pytest.raises(ValueError, match=wanted):
        given(adapted, "--adapter-path", value, *words)


def test_an_adapter_with_more_than_lora_is_refused(adapted, tmp_path):
    config = peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=["lm_head"], r=2)
    peft.get_peft_model(adapted._whole(), config).save_pretrained(tmp_path)
    (stage,) = built_stages(
        train_model_register["causal_lm"], adapted.base.folder, 1, is_piece=True
    )
    with pytest.raises(UserError, match="trained whole"):
        attach_beside(stage, [str(tmp_path)])


def of_pictures(processor):
    return pictured_prompts(processor, prompt_fn=fill, image_token=auto)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "internvl"])
def test_families_and_pictures(family, tmp_path):
    """Serve Conv1D, experts without adapters, and vision towers whose passes have no rows."""
    has_pictures = family in VISION_LANGUAGE
    if has_pictures:
        model = decoded_vision_model(family, tmp_path / "base", encode=of_pictures)
    else:
        model = decoded_text_model(family, tmp_path / "base", num_prompts=4)
    wholes, folders = [load_whole(model.folder)], []
    for seed in range(2):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            target_modules=["q_proj", "o_proj"] if family == "mixtral" else "all-linear",
            fan_in_fan_out=family == "gpt2",
            r=2,
            lora_alpha=4,
            init_lora_weights=False,
        )
        whole = peft.get_peft_model(load_whole(model.folder), config)
        whole.save_pretrained(tmp_path / str(seed))
        wholes.append(whole.eval())
        folders.append(str(tmp_path / str(seed)))
    key = "vision_language" if has_pictures else "causal_lm"
    stages = built_stages(train_model_register[key], model.folder, 2, is_piece=True)
    for stage in stages:
        attach_beside(stage, folders)
    engine = local_engine(stages, model.processor, max_rows=12, max_length=512)
    engine.prompt_cells = stages[0].fixed_cells
    orders = noted_orders(engine)
    sampling = Sampling(max_new_tokens=8, stop_token_ids=())
    pairs = [(place, number) for place in range(len(model.prompts)) for number in range(3)]
    asked = [Request(f"{p} {n}", model.prompts[p], sampling, n) for p, n in pairs]
    found = {event.key: event.token_ids for event in engine.answer(asked)}
    for place, number in pairs:
        prompt = model.prompts[place]
        made = wholes[number].generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        wanted = tuple(made[0, prompt["input_ids"].shape[1] :].tolist())
        assert found[f"{place} {number}"] == wanted, (place, number)
    assert any(len(set(order.adapters)) == 3 for order in orders if order.kind == "decode")
