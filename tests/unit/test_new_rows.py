"""Rows of new tokens against the unsplit transformers model, resized, with a mask on gradients."""

import json

import peft
import pytest
import torch

from stageline.checkpoint.adapter import attach_adapter, read_adapter
from stageline.checkpoint.plain_model import load_plain
from stageline.checkpoint.save import save_split_model
from stageline.modules.methods import FreezeRule, Methods
from stageline.modules.new_rows import NewRows
from stageline.pipeline.runner import LocalStages
from stageline.training.optimizers import optimizer_groups
from stageline.verify.export import load_with_peft
from tests.helpers.chain import chained_logits
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class, load_stages, shake, tiny_whole
from tests.helpers.tiny_models import VOCAB_SIZE

IDS = (40, VOCAB_SIZE, VOCAB_SIZE + 1)  # one in an unused row, two beyond the last
PIECES = ((9, 10), (11,), (12, 13, 12))
NUM_ROWS = VOCAB_SIZE + 2
DTYPE = torch.float64
ADAMW = {"lr": 0.05, "weight_decay": 0.1}


def new_rows(**changes):
    return NewRows(**{"ids": IDS, "pieces": PIECES, "fresh": frozenset(IDS), **changes})


def make_stages(base, num_stages, *, checkpoint=None, rows=None, dtype=DTYPE, **options):
    options = {"dtype": dtype, "new_rows": rows, **options}
    return LocalStages(load_stages(base, checkpoint, num_stages, **options))


def batch_of(family, dtype=DTYPE):
    """Return a micro-batch with each new token in the prompt and among the targets."""
    batch = tiny_micro_batches(family, dtype=dtype)[2]
    for place, token in zip((-9, -7, -4), IDS, strict=True):
        batch["input_ids"][0, place] = token
        batch["labels"][0, place] = token
    return batch


def loss_of(logits, batch):
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )


def reference(family, folder, *, dtype=DTYPE):
    """Return transformers' model with rows for the new tokens, set here by hand."""
    model = auto_class(family).from_pretrained(folder, dtype=dtype)
    model.resize_token_embeddings(NUM_ROWS, mean_resizing=False)
    matrices = {id(m.weight): m.weight for m in vocabulary(model)}
    with torch.no_grad():
        for weight in matrices.values():
            for token, pieces in zip(IDS, PIECES, strict=True):
                weight[token] = torch.stack([weight[piece] for piece in pieces]).mean(0)
    return model, list(matrices.values())


def vocabulary(model):
    return model.get_input_embeddings(), model.get_output_embeddings()


def train_reference(model, matrices, batch, steps):
    """AdamW on whole matrices, of which all but the new rows are put back after each step."""
    model.requires_grad_(False)
    for weight in matrices:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(matrices, **ADAMW)
    old = [weight.detach().clone() for weight in matrices]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model(**inputs).logits, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for weight, before in zip(matrices, old, strict=True):
                rows = weight[list(IDS)].clone()
                weight.copy_(before)
                weight[list(IDS)] = rows


def train(stages, batch, steps):
    parameters = {n: p for n, p in stages.named_parameters().items() if p.requires_grad}
    optimizer = torch.optim.AdamW(optimizer_groups(parameters, weight_decay=0.1), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(chained_logits(stages, batch), batch).backward()
        optimizer.step()
    return parameters


@pytest.mark.parametrize(
    ("family", "tied", "num_stages"),
    [
        ("llama", False, 2),
        ("llama", True, 1),
        ("gpt2", True, 2),
        ("gemma3", False, 1),
        ("internvl", True, 2),
    ],
)
def test_rows_alone_are_those_of_the_resized_model(family, tied, num_stages, tmp_path):
    tiny_whole(family, tmp_path / "base", tied=tied)
    frozen = {f"frozen_{part}": True for part in ("vit", "mlp", "llm", "lm_head")}
    rows = new_rows(train_alone=True)
    stages = make_stages(tmp_path / "base", num_stages, rows=rows, **frozen)
    theirs, matrices = reference(family, tmp_path / "base")
    batch = batch_of(family)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    expected = theirs(**inputs).logits
    torch.testing.assert_close(chained_logits(stages, batch), expected, rtol=0, atol=1e-9)
    trained = train(stages, batch, steps=4)
    assert all(parameter.shape[0] == len(IDS) for parameter in trained.values())
    assert len(trained) == (1 if tied else 2)
    train_reference(theirs, matrices, batch, steps=4)
    expected = theirs(**inputs).logits
    torch.testing.assert_close(chained_logits(stages, batch), expected, rtol=0, atol=1e-9)
    saved = save_split_model(list(stages), None, tmp_path / "saved")
    again = auto_class(family).from_pretrained(saved, dtype=DTYPE)
    start, _ = reference(family, tmp_path / "base")
    kept = [token for token in range(VOCAB_SIZE) if token not in IDS]
    for module, trained_one, before in zip(
        vocabulary(again), vocabulary(theirs), vocabulary(start), strict=True
    ):
        assert module.weight.shape[0] == NUM_ROWS == again.config.get_text_config().vocab_size
        assert torch.equal(module.weight[kept], before.weight[kept])
        ids = list(IDS)
        assert (module.weight[ids] - before.weight[ids]).abs().max() > 0.01
        difference = module.weight[ids] - trained_one.weight[ids]
        assert difference.abs().max() < 1e-9
    assert set(again.state_dict()) == set(start.state_dict())
    # the rest of the model, too, is what it was
    for name, value in again.state_dict().items():
        if value.shape[:1] != (NUM_ROWS,):
            assert torch.equal(value, start.state_dict()[name]), name


def test_rows_that_are_known_keep_their_values(tmp_path):
    tiny_whole("llama", tmp_path / "base")
    stages = make_stages(tmp_path / "base", 1, rows=new_rows())
    train(stages, batch_of("llama"), steps=1)
    folder = save_split_model(list(stages), None, tmp_path / "first")
    before = load_plain(folder, dtype=DTYPE).get_input_embeddings().weight
    (again,) = make_stages(folder, 1, rows=new_rows(fresh=frozenset()))
    assert torch.equal(again.get_parameter("model.embed_tokens.weight"), before)
    (anew,) = make_stages(folder, 1, rows=new_rows())
    weight = anew.get_parameter("model.embed_tokens.weight")
    assert torch.equal(weight[VOCAB_SIZE], before[PIECES[1][0]])


LORA = {"llm_lora_num": 1, "lora_rank": 3, "lora_alpha": 6.0}


@pytest.mark.parametrize(
    ("options", "whole", "alone"),
    [
        ({}, {"model.embed_tokens", "lm_head"}, set()),
        (LORA, {"lm_head"}, {"model.embed_tokens"}),
        (LORA | {"frozen_lm_head": True}, set(), {"model.embed_tokens", "lm_head"}),
        (
            LORA | {"modules_to_save": ("embed_tokens", "lm_head")},
            {"model.embed_tokens", "lm_head"},
            set(),
        ),
        ({"frozen_llm": True}, {"lm_head"}, {"model.embed_tokens"}),
        ({"methods": Methods(freeze=FreezeRule(1))}, set(), {"model.embed_tokens", "lm_head"}),
    ],
    ids=["all", "lora", "frozen_head", "modules_to_save", "frozen_llm", "last_layer"],
)
def test_rows_of_a_frozen_matrix_train(options, whole, alone, tmp_path):
    """LoRA leaves embedding and head as they are: new rows would stay what they began as."""
    base = tmp_path / "base"
    tiny_whole("llama", base)
    stages = make_stages(base, 2, rows=new_rows(), **options)
    for stage in stages:
        assert {name for name in stage.parameter_order if "new_rows" in name} == {
            f"{path}.new_rows.weight" for path in alone
        }
    before = {n: p.detach().clone() for n, p in stages.named_parameters().items()}
    trained = set(train(stages, batch_of("llama"), steps=1))
    matrices = {"model.embed_tokens", "lm_head"}
    assert {name.removesuffix(".weight") for name in trained} & matrices == whole
    assert {
        name.removesuffix(".new_rows.weight") for name in trained if "new_rows" in name
    } == alone
    after = stages.named_parameters()
    for path in alone:
        assert (after[f"{path}.new_rows.weight"] != before[f"{path}.new_rows.weight"]).any(1).all()
    for path in whole:
        changed = after[f"{path}.weight"] != before[f"{path}.weight"]
        assert changed[list(IDS)].any(1).all()


@pytest.mark.parametrize(
    ("family", "head"), [("llama", "tied"), ("internvl", "rows"), ("llama", "whole")]
)
def test_peft_loads_lora_and_rows(family, head, tmp_path):
    tiny_whole(family, tmp_path / "base", tied=head == "tied")
    frozen = {f"frozen_{part}": True for part in ("vit", "mlp")}
    rows = new_rows(train_alone=head != "whole")
    base = tmp_path / "base"
    options = {**LORA, **frozen, "dtype": torch.float32}
    stages = make_stages(base, 2, rows=rows, **options)
    batch = batch_of(family, torch.float32)
    train(stages, batch, steps=3)
    expected = chained_logits(stages, batch)
    folder = save_split_model(list(stages), None, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    told = config["trainable_token_indices"]
    assert set(map(tuple, told.values())) == {IDS}
    assert len(told) == (2 if head == "rows" else 1)
    assert (config["modules_to_save"] is not None) == (head == "whole")

    plain = auto_class(family).from_pretrained(tmp_path / "base")
    plain.resize_token_embeddings(NUM_ROWS, mean_resizing=False)
    theirs = peft.PeftModel.from_pretrained(plain, folder)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    found = theirs(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours = attach_adapter(auto_class(family).from_pretrained(tmp_path / "base"), folder)
    torch.testing.assert_close(ours(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    through_peft = load_with_peft(folder, auto_class(family).from_pretrained(tmp_path / "base"))
    torch.testing.assert_close(through_peft(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    assert (
        expected - reference(family, base, dtype=torch.float32)[0](**inputs).logits
    ).abs().max() > 0.1

    # an adapter on it, which knows nothing of new tokens itself
    twice = {**options, "llm_lora_num": 2, "lora_rank": 2, "frozen_lm_head": True}
    second = make_stages(base, 2, checkpoint=folder, **twice)
    torch.testing.assert_close(chained_logits(second, batch), expected, rtol=1e-5, atol=1e-5)
    train(second, batch, steps=2)
    expected = chained_logits(second, batch)
    folder = save_split_model(list(second), None, tmp_path / "second")
    if head != "whole":
        assert read_adapter(folder).rows
        ours = attach_adapter(auto_class(family).from_pretrained(tmp_path / "base"), folder)
        torch.testing.assert_close(ours(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_that_peft_made_with_rows(tmp_path):
    tiny_whole("llama", tmp_path / "base", tied=True)
    plain, _ = reference("llama", tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": list(IDS)}
    )
    model = peft.get_peft_model(plain, config)
    shake([model])
    model.save_pretrained(tmp_path / "theirs")
    batch = batch_of("llama", torch.float32)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    expected = model.eval()(**inputs).logits
    ours = attach_adapter(
        auto_class("llama").from_pretrained(tmp_path / "base"), tmp_path / "theirs"
    )
    torch.testing.assert_close(ours(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
