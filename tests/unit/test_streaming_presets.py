"""Decoders of transformers as rows of layers: each family against its own unsplit model."""

import copy

import pytest
import torch
import transformers
from torch import nn

from stageline.errors import UserError
from stageline.streaming.engine import RoundPipe
from stageline.streaming.lanes import Lane
from stageline.streaming.plan import Plan
from stageline.streaming.presets import sequential_of
from stageline.streaming.run_config import RoundPipeRunConfig
from tests.helpers.late_queues import late_lanes
from tests.helpers.tiny_batches import join_micro_batches, tiny_micro_batches
from tests.helpers.tiny_models import VOCAB_SIZE, tiny_config

ROWS, PARTS = 6, 3


def make_model(family, *, tied=False, attention=None, **fields):
    torch.manual_seed(5)
    config = tiny_config(family, tied=tied, **fields)
    attention = attention or ("eager" if family == "gemma2" else "sdpa")
    # transformers' eager attention gives NaN in float64 for rows that are all padding
    dtype = torch.float32 if attention == "eager" else torch.float64
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager", dtype=dtype
    )


def make_batch(family):
    """Padded rows with very different numbers of targets."""
    return join_micro_batches(tiny_micro_batches(family, lengths=(14, 9, 11)))


def parts_of(batch):
    """Split a batch as the engine does."""
    return [
        {name: value.tensor_split(PARTS)[part] for name, value in batch.items()}
        for part in range(PARTS)
    ]


def loss_of(output, label):
    return output.loss


def engine_of(model, lanes=None, **config):
    row = sequential_of(model)
    settings = RoundPipeRunConfig(num_microbatch=PARTS, **config)
    engine = RoundPipe(row, model_run_config=settings, lanes=lanes or [Lane.cpu()])
    engine.set_original_model(model)
    return engine


def through(row, **inputs):
    """Return the output of a row that runs layer by layer."""
    value = row[0](**inputs)
    for layer in row[1:]:
        value = layer(value)
    return value


def plain_loop(model, batch, **more):
    """Return the sum of the micro-batches' losses; gradients are added up in the model."""
    total = 0
    for part in parts_of(batch):
        loss = model(**part, **more).loss
        loss.backward()
        total = total + loss.detach()
    return total


def assert_close(one, other):
    exact = {"rtol": 1e-10, "atol": 1e-12} if one.dtype == torch.float64 else {}
    torch.testing.assert_close(one, other, **exact)


def assert_gradients(ours, theirs):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert_close(one.grad, other.grad)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi3", "gemma2", "mixtral"])
def test_a_family_is_its_unsplit_model(family):
    model, batch = make_model(family), make_batch(family)
    plain = copy.deepcopy(model)
    more = {"output_router_logits": True} if family == "mixtral" else {}
    # the mean over all targets: not that of micro-batches' means
    more["num_items_in_batch"] = int((batch["labels"][:, 1:] != -100).sum())
    engine = engine_of(model, late_lanes(2))
    loss, output = engine.forward_backward(
        input_kwargs={**batch, **more}, loss_fn=loss_of, return_outputs=True
    )
    engine.synchronize()
    assert_close(loss, plain_loop(plain, batch, **more))
    assert_gradients(model, plain)
    with torch.no_grad():
        whole = plain(**batch, **more)
    assert type(output) is type(whole)
    assert_close(output.logits, whole.logits)
    if family == "mixtral":
        assert len(output.router_logits) == len(whole.router_logits) == 4
        assert whole.aux_loss > 0
        shape = whole.router_logits[0].shape
        assert output.router_logits[0].shape == shape


def test_tied_weights_are_one_and_stay_one():
    model, batch = make_model("llama", tied=True), make_batch("llama")
    plain = copy.deepcopy(model)
    engine = engine_of(model, [Lane.cpu(), Lane.cpu()])
    names = [name for name, _ in engine.optim_named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    assert "lm_head.weight" not in names
    ours = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        loss = engine.forward_backward(input_kwargs=batch, loss_fn=loss_of)
        assert_close(loss, plain_loop(plain, batch))
        engine.step(ours.step, is_async=False)
        theirs.step()
        theirs.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one, other)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_frozen_weights_get_nothing_and_masks_ask_for_nothing():
    model, batch = make_model("gemma3", attention="eager"), make_batch("gemma3")
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.requires_grad_(False)
        each.model.layers[2].self_attn.q_proj.requires_grad_(True)
    asked = []
    model.model.layers[3].register_forward_pre_hook(
        lambda layer, args, kwargs: asked.append(
            (args[0].requires_grad, kwargs["attention_mask"].requires_grad)
        ),
        with_kwargs=True,
    )
    layers = [range(number, number + 1) for number in range(6)]
    engine = engine_of(model, execute_plan=Plan(tuple(layers[:5]), tuple(layers[::-1])))
    assert [hosted.is_trained for hosted in engine._hosted_layers].index(True) == 3
    loss = engine.forward_backward(input_kwargs=batch, loss_fn=loss_of)
    engine.synchronize()
    assert_close(loss, plain_loop(plain, batch))
    assert_gradients(model, plain)
    assert asked and not any(mask for _, mask in asked)
    assert any(hidden for hidden, _ in asked)


def test_the_forward_call_and_embeddings_that_want_gradients():
    model, batch = make_model("qwen3"), make_batch("qwen3")
    plain = copy.deepcopy(model)
    embedded = torch.randn(ROWS, batch["input_ids"].shape[1], 16, dtype=torch.float64)
    inputs = {"attention_mask": batch["attention_mask"], "position_ids": None}
    mine, others = (embedded.clone().requires_grad_(True) for _ in range(2))
    output = engine_of(model)(inputs_embeds=mine, logits_to_keep=2, **inputs)
    whole = plain(inputs_embeds=others, logits_to_keep=2, **inputs)
    assert output.logits.shape == (ROWS, 2, VOCAB_SIZE)
    assert_close(output.logits, whole.logits)
    output.logits.square().sum().backward()
    whole.logits.square().sum().backward()
    assert_close(mine.grad, others.grad)


def test_what_is_set_on_the_model_later_holds():
    model, batch = make_model("llama"), make_batch("llama")
    engine = engine_of(model)
    engine.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 7
    assert engine.forward_backward(input_kwargs=batch, loss_fn=loss_of) == 7 * PARTS
    assert engine(**batch, return_dict=False)[0] == 7


def test_text_is_generated_by_the_model_itself():
    model = make_model("llama")
    plain = copy.deepcopy(model)
    engine = engine_of(model)
    ids = torch.tensor([[5, 9, 12]])
    limits = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(engine.generate(ids, **limits), plain.generate(ids, **limits))


def test_what_belongs_to_generation_is_refused():
    model = make_model("llama")
    engine = engine_of(model)
    ids = torch.tensor([[5, 9, 12]])
    cache = transformers.DynamicCache()
    for name, value in (("use_cache", True), ("past_key_values", cache), ("cache", cache)):
        with pytest.raises(ValueError, match=f"{name}:.* a model that streams"):
            engine(ids, **{name: value})
    assert engine(ids, use_cache=False, past_key_values=None).past_key_values is None

    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states: a model that streams"):
        engine(torch.tensor([[5, 9]]))


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("kind", ["opt", "bloom", "bare", "classifier"])
def test_other_shapes_of_models(kind):
    """A decoder inside of the base, layers that return tuples, no head, another head."""
    torch.manual_seed(0)
    if kind == "opt":
        fields = {**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**fields))
    elif kind == "bloom":
        model = transformers.BloomForCausalLM(
            transformers.BloomConfig(**{**SMALL, "n_layer": 2, "n_head": 2})
        )
    elif kind == "bare":
        model = transformers.LlamaModel(tiny_config("llama"))
    else:
        config = tiny_config("llama", num_labels=3, pad_token_id=0)
        model = transformers.LlamaForSequenceClassification(config)
    model.eval()
    ids = torch.randint(3, 32, (4, 6))
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    value = through(sequential_of(model), input_ids=ids, attention_mask=torch.ones_like(ids))
    assert type(value) is type(expected)
    assert torch.equal(value[0], expected[0])


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_images_come_in_by_the_first_piece(family):
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(tiny_config(family))
    plain = copy.deepcopy(model)
    batch = tiny_micro_batches(family, lengths=(14,))[0]
    settings = RoundPipeRunConfig(num_microbatch=1)
    engine = RoundPipe(sequential_of(model), model_run_config=settings, lanes=[Lane.cpu()])
    loss = engine.forward_backward(input_kwargs=batch, loss_fn=loss_of)
    expected = plain(**batch).loss
    expected.backward()
    engine.synchronize()
    assert_close(loss, expected.detach())
    assert_gradients(model, plain)
    if family == "llava":  # the tower's last layer is not used: it has no gradient, not zeros
        assert model.model.vision_tower.encoder.layers[-1].mlp.fc1.weight.grad is None


def test_layers_that_are_left_out_by_chance_are_refused():
    fields = {**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**fields, layerdrop=1.0))
    row = sequential_of(model.eval())
    model.train()  # the mode is that of the model, and the row follows it
    row.train()
    with pytest.raises(UserError, match="layerdrop"):
        row[0](torch.tensor([[5, 9]]))


def test_adapters_of_peft_stream_with_their_layers():
    peft = pytest.importorskip("peft")
    chosen = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(**chosen, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model("llama"), config)
    plain, batch = copy.deepcopy(model), make_batch("llama")
    engine = engine_of(model)
    assert all("lora_" in name for name, _ in engine.optim_named_parameters())
    assert [len(hosted.homes) for hosted in engine._hosted_layers] == [1, 13, 13, 13, 13, 2]
    loss = engine.forward_backward(input_kwargs=batch, loss_fn=loss_of)
    engine.synchronize()
    assert_close(loss, plain_loop(plain, batch))
    assert_gradients(model, plain)


class MiddleDecoder(transformers.LlamaModel):
    """Computes between its layers or after its norm, or gives all layers the same."""

    where = "between"

    def forward(self, input_ids=None, **kwargs):
        hidden = start = self.embed_tokens(input_ids)
        positions = torch.arange(hidden.shape[1])[None]
        turns = self.rotary_emb(hidden, position_ids=positions)
        for layer in self.layers:
            given = start if self.where == "beside" else hidden
            hidden = layer(given, position_embeddings=turns)
            hidden = hidden * 2 if self.where == "between" else hidden
        hidden = self.norm(hidden)
        hidden = hidden * 2 if self.where == "after" else hidden
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=hidden)


@pytest.mark.parametrize("where", ["between", "beside", "after"])
def test_a_model_that_computes_between_its_layers_streams(where, monkeypatch):
    monkeypatch.setattr(MiddleDecoder, "where", where)
    model = MiddleDecoder(tiny_config("llama")).eval()
    ids = torch.randint(3, 32, (4, 6))
    assert torch.equal(through(sequential_of(model), input_ids=ids)[0], model(ids)[0])


def test_an_encoder_streams_too():
    fields = {**SMALL, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(**fields)).eval()
    ids = torch.randint(3, 32, (4, 6))
    given = {"attention_mask": torch.tensor([[1] * 6] * 3 + [[1] * 4 + [0] * 2])}
    made = through(sequential_of(model), input_ids=ids, **given)
    assert torch.equal(made[0], model(ids, **given)[0])


def test_what_reads_more_than_text_and_pictures_has_no_preset():
    with pytest.raises(NotImplementedError, match="Linear is not a model of transformers"):
        sequential_of(nn.Linear(2, 2))
    fields = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    encoder_decoder = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields))
    with pytest.raises(NotImplementedError, match="reads more than text and pictures"):
        sequential_of(encoder_decoder)
