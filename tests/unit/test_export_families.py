"""Export of every family and kind of training: the trained stages' logits and tokens, in plain.

What is compared with are the stages in memory, as a run trained them, chained here by hand; the
export's own check, which fills stages from the files again, has to agree.
"""

import logging
import warnings

import peft
import pytest
import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

import pp_models  # noqa: F401 - puts the parts that make_stages looks for on the shelf
from commands.export import make_stages
from pp_models import CausalLMStage, VisionLanguageStage
from register import train_model_register
from stageline.checkpoint.files import tensor_names
from stageline.checkpoint.save import save_split_model
from tests.helpers.chain import chained_logits
from tests.helpers.exports import export_folder
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class, shake, tiny_whole
from tests.helpers.tiny_models import IMAGE_TOKEN_ID, TYPICAL, VOCAB_SIZE

ADDED_ROWS = 9
NEW_TOKENS = 4
STACKED = ("llama", "mixtral", "internvl")


def build(family, folder, *, base=None, num_loras=0):
    """Two stages by the family's key, with the weights of a folder, and changed as by training."""
    stages = []
    for stage in range(2):
        model, _, _ = train_model_register[family](
            config_path=str(base or folder),
            processor_path=None,
            checkpoint_path=str(folder),
            stage=stage,
            num_stages=2,
            llm_lora_num=num_loras,
            lora_rank=2 + num_loras,
            lora_alpha=5.0,
            is_piece=True,  # no processor
        )
        stages.append(model)
    assert isinstance(stages[0], CausalLMStage | VisionLanguageStage)
    return shake(stages)


def first_batch(family):
    batch = tiny_micro_batches(family, lengths=(14,))[0]
    del batch["labels"]
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return batch


@torch.no_grad()
def chained_tokens(stages, batch):
    for _ in range(NEW_TOKENS):
        logits = chained_logits(stages, batch)[:, -1:]
        logits[..., IMAGE_TOKEN_ID] = -torch.inf
        token = logits.argmax(-1)
        more = {"input_ids": token, "attention_mask": torch.ones_like(token)}
        more |= dict.fromkeys(("mm_token_type_ids", "token_type_ids"), torch.zeros_like(token))
        batch = {
            name: torch.cat([value, more[name]], dim=1) if name in more else value
            for name, value in batch.items()
        }
    return batch["input_ids"][:, -NEW_TOKENS:]


def load_quietly(family, folder, caplog):
    """from_pretrained, which must neither warn nor report a name."""
    logger = transformers_logging.get_logger()
    logger.addHandler(caplog.handler)
    caplog.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # transformers 5.17 takes a kernel for Gemma 2 by default that ignores the cap of scores
            own = {"attn_implementation": "eager"} if family == "gemma2" else {}
            auto = auto_class(family)
            model, info = auto.from_pretrained(folder, output_loading_info=True, **own)
    finally:
        logger.removeHandler(caplog.handler)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert {name: keys for name, keys in info.items() if keys} == {}
    return model.eval()


def assert_same(stages, model, family):
    batch = first_batch(family)
    stages = [stage.eval() for stage in stages]
    with torch.no_grad():
        expected = chained_logits(stages, batch)
        found = model(**batch).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = [IMAGE_TOKEN_ID]  # it would stand for no image
    tokens = model.generate(**batch, do_sample=False, max_new_tokens=NEW_TOKENS)
    assert torch.equal(tokens[:, -NEW_TOKENS:], chained_tokens(stages, batch))


def check(report, tolerance=1e-5):
    assert report.verdict.reference == "its 2 stages"
    assert report.verdict.difference <= tolerance
    assert report.verdict.tolerance == tolerance


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        # tied or not, resized or not, for one family of each kind; the others: "lora", merged there
        *(("full", family) for family in ("mixtral", "internvl")),
        *(("tied_resized", family) for family in ("llama", "gpt2", "gemma3_vl")),
        *(("resized", family) for family in ("gpt_neox", "qwen2_5_vl")),
    ],
)
def test_full(kind, family, tmp_path, caplog):
    whole = tiny_whole(family, tied="tied" in kind)
    if "resized" in kind:
        whole.resize_token_embeddings(VOCAB_SIZE + ADDED_ROWS, mean_resizing=False)
    whole.save_pretrained(tmp_path / "base")
    stages = build(family, tmp_path / "base")
    run = save_split_model(stages, None, tmp_path / "run", step=1)
    check(export_folder(run, tmp_path / "out", make_stages=make_stages))
    model = load_quietly(family, tmp_path / "out", caplog)
    assert_same(stages, model, family)
    names = [n for file in (tmp_path / "out").glob("*.safetensors") for n in tensor_names(file)]
    assert any("lm_head" in name or "embed_out" in name for name in names) is ("tied" not in kind)
    text = AutoConfig.from_pretrained(tmp_path / "out").get_text_config(decoder=True)
    rows = VOCAB_SIZE + (ADDED_ROWS if "resized" in kind else 0)
    assert text.vocab_size == rows == model.get_input_embeddings().weight.shape[0]


@pytest.mark.parametrize(
    ("kind", "family"),
    [("lora_on_lora" if family in STACKED else "lora", family) for family in TYPICAL],
)
def test_lora(kind, family, tmp_path, caplog):
    tiny_whole(family, tmp_path / "base")
    base = tmp_path / "base"
    stages = build(family, base, num_loras=1)
    run = save_split_model(stages, None, tmp_path / "run", step=1)
    if kind == "lora_on_lora":
        stages = build(family, run, base=base, num_loras=2)
        run = save_split_model(stages, None, tmp_path / "second", step=1)
    check(export_folder(run, tmp_path / "adapter", make_stages=make_stages))
    check(export_folder(run, tmp_path / "merged", merge=True, make_stages=make_stages))
    assert_same(stages, load_quietly(family, tmp_path / "merged", caplog), family)
    adapted = peft.PeftModel.from_pretrained(
        auto_class(family).from_pretrained(base), tmp_path / "adapter"
    )
    assert_same(stages, adapted.get_base_model().eval(), family)
