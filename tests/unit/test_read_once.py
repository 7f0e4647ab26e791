"""Rows that begin alike: a pass that reads their first tokens once has the whole gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.contracts import IGNORE, SHARED
from tests.helpers.decoded_models import decoded_text_model
from tests.helpers.decoding_engines import built_stages

SIZE, LENGTHS = 11, (24, 17, 20, 13)  # longer than the windows of some families


def rows():
    """Ids, mask and labels [4, 24], padded on the right."""
    ids = torch.randint(5, 60, (len(LENGTHS), max(LENGTHS)), generator=torch.manual_seed(0))
    ids[:, : SIZE + 1] = ids[:1, : SIZE + 1]
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    labels = ids.masked_fill(mask == 0, IGNORE)
    labels[:, : SIZE + 1] = IGNORE
    return ids, mask, labels


def loss_of(logits, labels):
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


@pytest.fixture(scope="module", params=["llama", "gemma2", "phi3"])
def model(request, tmp_path_factory):
    return decoded_text_model(request.param, tmp_path_factory.mktemp("model"), num_prompts=1)


@pytest.mark.parametrize("num_stages", [2])
def test_gradients_are_those_of_the_unsplit_model(model, num_stages):
    ids, mask, labels = rows()
    whole = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float64)
    wanted = 0.0
    for row, label, length in zip(ids, labels, LENGTHS, strict=True):  # alone, without padding
        logits = whole(input_ids=row[None, :length], use_cache=False).logits
        loss = loss_of(logits, label[None, :length])
        loss.backward()
        wanted += loss.item()
    build = train_model_register["causal_lm"]
    stages = built_stages(build, model.folder, num_stages, dtype=torch.float64)
    seen = []
    embedding = stages[0].get_submodule("model.embed_tokens")
    embedding.register_forward_hook(lambda module, args, output: seen.append(output.shape[:2]))
    out = ids
    for stage in stages:
        assert stage.reads_once
        out = stage(out, input_ids=ids, attention_mask=mask, **{SHARED: torch.arange(SIZE)})
    assert [tuple(one) for one in seen] == [(1, SIZE), (len(ids), ids.shape[1] - SIZE)]
    found = loss_of(out, labels)
    found.backward()
    assert found.item() == pytest.approx(wanted, rel=1e-7)
    grads = {name: value.grad for name, value in whole.named_parameters()}
    for stage in stages:
        for name, value in stage.named_parameters():
            # norms of these families compute in float32
            torch.testing.assert_close(value.grad, grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"llm_lora_num": 1, "lora_dropout": 0.1}, {"gradient_checkpointing": True}],
    ids=lambda one: next(reversed(one)),
)
def test_rows_that_draw_or_layers_that_run_twice_are_read_whole(model, options):
    (stage,) = built_stages(train_model_register["causal_lm"], model.folder, 1, **options)
    assert not stage.reads_once
