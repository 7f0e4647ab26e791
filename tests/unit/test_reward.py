"""Rows of pairs, the loss over their rewards, and where a reward model's weights come from."""

import functools
import json

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from commands.train_data import check_scores
from loss_fn import has_reward, rm
from parse_args import parse_train_args
from pp_models import RewardStage
from prompt_fn import chat, none
from register import collate_fn_register, engine_register, import_shelf
from stageline.checkpoint.init import init_split_model
from stageline.checkpoint.load import CheckpointMismatch
from stageline.data.batches.batch import count_samples
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.batches.preference import both_answers, collate_rewards, encode_scored_pair
from stageline.data.batches.preflight import preflight
from stageline.errors import DataError, UserError
from tests.helpers.registers import restored_registers
from tests.helpers.shelf_losses import shelf_loss
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

import_shelf()

QUESTION = [{"role": "user", "content": "Which number?"}]


def said(text):
    return [{"role": "assistant", "content": text}]


def pair(chosen="yes", rejected="no, no", **fields):
    return None, {
        "id": "a",
        "messages": QUESTION,
        "chosen": said(chosen),
        "rejected": said(rejected),
        **fields,
    }


def common(tokenizer, **changes):
    return {
        "prompt": "[QUESTION][ANSWER]",
        "prompt_fn": chat,
        "image_token": none,
        "processor": tokenizer,
        "pad_token_id": tokenizer.pad_token_id,
        "max_token_num": 64,
        "stage": 0,
        **changes,
    }


def test_rows_are_the_tokenizers_own_and_pairs_lie_side_by_side():
    tokenizer = tiny_tokenizer()
    samples = [pair(), pair("7", "It is 7", margin=0.5)]
    batch = collate_rewards(samples, **common(tokenizer))
    row = 0
    for _, sample in samples:
        for name in ("chosen", "rejected"):
            ids = tokenizer.apply_chat_template(QUESTION + sample[name])["input_ids"]
            assert batch["input_ids"][row, : len(ids)].tolist() == ids
            assert batch["attention_mask"][row].sum() == len(ids)
            places = (batch["labels"][row] != -100).nonzero().flatten().tolist()
            assert places == [len(ids) - 1]
            row += 1
    assert batch["loss_margins"].tolist() == [0.0, 0.5] and row == len(batch["input_ids"])
    assert count_samples(batch) == 2, "a pair is one"


def test_a_row_ends_before_eos_where_that_is_the_padding_token():
    """Read where transformers' classifier reads: at the last id that is not the padding id."""
    tokenizer = tiny_tokenizer(
        chat_template="{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    )
    tokenizer.pad_token = "</s>"
    batch = collate_rewards([pair()], **common(tokenizer))
    config = tiny_config("llama", num_labels=1, vocab_size=len(tokenizer))
    config.pad_token_id = tokenizer.pad_token_id
    stage = RewardStage(config, stage=0, num_stages=1)
    init_split_model(stage, seed=0, device="cpu", dtype=torch.float32)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.load_state_dict(stage.state_dict())
    with torch.no_grad():
        scores = stage.eval()(batch["input_ids"], attention_mask=batch["attention_mask"])
        theirs = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(scores[batch["labels"] != -100], theirs)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"chosen": None}, "'chosen' is missing"),
        ({"rejected": []}, "'rejected' is"),
        ({"margin": "much"}, "`margin` is 'much'"),
    ],
)
def test_a_bad_pair_is_named(change, match):
    _, sample = pair(source="rows.jsonl:3")
    with pytest.raises(DataError, match=rf"rows\.jsonl:3.*{match}"):
        collate_rewards([(None, {**sample, **change})], **common(tiny_tokenizer()))


def test_texts_stand_for_answers():
    chosen, rejected = both_answers({"messages": QUESTION, "chosen": "a", "rejected": "b"})
    assert chosen == {"messages": QUESTION + said("a")}
    assert rejected["messages"][-1]["content"] == "b"
    plain, _ = both_answers({"question": "?", "chosen": "a", "rejected": "b"})
    assert plain == {"question": "?", "answer": "a"}


@pytest.mark.filterwarnings("ignore:.*is dropped")
def test_a_pair_with_a_dropped_row_and_rows_that_fill_up_count_for_nothing():
    samples = [pair("yes", "no " * 40), pair(), pair("7")]
    collate = functools.partial(
        collate_rewards, **common(tiny_tokenizer(), max_token_num=40, overlong="drop")
    )
    batch = collate(samples)
    assert has_reward(batch).sum() == 2
    assert (batch["labels"][:2] == -100).all()
    loader = MicroBatchLoader(
        samples, collate=collate, batch_size=2, micro_batch_size=2, eval=True, shuffle=False
    )
    first, last = (step[0] for step in loader)
    assert first["loss_rows"].tolist() == [0, 0, 1, 1]
    assert last["loss_rows"].tolist() == [2, 2, -1, -1]
    assert has_reward(first).sum() == 1 and has_reward(last).sum() == 1


def test_both_answers_are_looked_through_before_training():
    texts = common(tiny_tokenizer())
    names = ("prompt", "prompt_fn", "image_token", "processor")
    options = {name: texts[name] for name in names}

    def encode(max_token_num):
        given = {**texts, "max_token_num": max_token_num}
        return functools.partial(encode_scored_pair, **given)

    report = preflight([pair(), pair()], **options, max_token_num=64, encode=encode(64))
    assert report.num_checked == report.num_rows == 2
    with pytest.raises(DataError, match="max-token-num 40"):
        preflight([pair("a", "no " * 40)], **options, max_token_num=40, encode=encode(40))


# -- the loss ------------------------------------------------------------------------------------


def scored_batch(margins=(0.0, 0.3, 0.0)):
    """Three pairs of scores; the last pair has no labels."""
    labels = torch.full((6, 5), -100)
    for row, place in enumerate((4, 2, 3, 3)):
        labels[row, place] = 9
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 5, 1, generator=generator)
    return scores, {"labels": labels, "loss_margins": torch.tensor(margins)}


def test_loss_and_figures_are_those_of_the_formula():
    scores, batch = scored_batch()
    chosen = torch.stack([scores[0, 4, 0], scores[2, 3, 0]])
    rejected = torch.stack([scores[1, 2, 0], scores[3, 3, 0]])
    wanted = -functional.logsigmoid(chosen - rejected - torch.tensor([0.0, 0.3])).mean()
    wanted = wanted + 0.1 * (chosen + rejected).square().mean()
    part = shelf_loss("rm", center_coefficient=0.1)
    counts = part.count([batch])
    assert counts == {"num_targets": 4, "num_pairs": 2}
    totals = {name: torch.tensor(float(count)) for name, count in counts.items()}
    loss, figures = part(scores, batch, totals=totals, step=0)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(figures["reward_margin"], (chosen - rejected).mean())
    torch.testing.assert_close(figures["chosen_reward"], chosen.mean())
    assert figures["reward_accuracy"] == (chosen > rejected).float().mean()
    assert not part.predicts_tokens


def test_half_a_pair_counts_for_nothing():
    scores, batch = scored_batch()
    batch["labels"][4, 3] = 9  # only the chosen row of the third pair has a label
    assert has_reward(batch).tolist() == [True, True, False]
    two = {"num_targets": torch.tensor(5.0), "num_pairs": torch.tensor(2.0)}
    loss, figures = rm(scores, batch, **two)
    scores[4, 3] += 9.0
    again, others = rm(scores, batch, **two)
    assert again == loss and others == figures


def test_logits_and_a_negative_coefficient_are_refused():
    scores, batch = scored_batch()
    one = {"num_targets": torch.tensor(1.0), "num_pairs": torch.tensor(1.0)}
    with pytest.raises(UserError, match="--train-model reward"):
        rm(scores.expand(-1, -1, 7), batch, **one)
    with pytest.raises(UserError, match="center_coefficient is -1"):
        rm(scores, batch, **one, center_coefficient=-1.0)


# -- where weights come from ---------------------------------------------------------------------


def save(folder, model_class, **fields):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = tiny_config("llama", vocab_size=len(tokenizer), **fields)
    model = model_class.from_config(config)
    model.save_pretrained(folder)
    return model


def build(folder, num_stages=1, seed=0, **options):
    paths = {"config_path": None, "processor_path": None, "checkpoint_path": str(folder)}
    return [
        RewardStage.build(**paths, stage=stage, num_stages=num_stages, seed=seed, **options)[0]
        for stage in range(num_stages)
    ]


def test_a_language_models_head_goes_and_the_score_starts_by_the_seed(tmp_path):
    language_model = save(tmp_path, AutoModelForCausalLM, tie_word_embeddings=True)
    (one,) = build(tmp_path)
    stages = build(tmp_path, 3)
    (other,) = build(tmp_path, seed=1)
    assert torch.equal(stages[-1].whole.score.weight, one.whole.score.weight)
    assert not torch.equal(other.whole.score.weight, one.whole.score.weight)
    weights = language_model.state_dict()
    for stage in stages:
        for name, value in stage.state_dict().items():
            assert name == "score.weight" or torch.equal(value, weights[name]), name
    # only the first stage has a tied embedding: no head needs it
    assert "model.embed_tokens.weight" not in stages[-1].state_dict()
    assert stages[-1].part_of("score.weight") == "lm_head"


def test_a_classifier_gives_its_score_or_is_refused(tmp_path):
    classifier = save(tmp_path, AutoModelForSequenceClassification, num_labels=1)
    (stage,) = build(tmp_path)
    assert torch.equal(stage.whole.score.weight, classifier.score.weight)
    save(tmp_path / "two", AutoModelForSequenceClassification, num_labels=2)
    with pytest.raises(UserError, match="has 2 labels"):
        build(tmp_path / "two")
    save(tmp_path / "bare", AutoModelForCausalLM)
    wrong = json.loads((tmp_path / "bare/config.json").read_text())
    wrong |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    wrong |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (tmp_path / "bare/config.json").write_text(json.dumps(wrong))
    with pytest.raises(CheckpointMismatch, match=r"missing: score\.weight"):
        build(tmp_path / "bare")


def test_keys_that_suit_the_rm_collate_part_need_not_be_given(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    words = ["--train-model", "reward", "--dataset", "jsonl", "--collate-fn", "rm"]
    with restored_registers():
        engine_register.register("pipeline", len, replace=True)
        parts = parse_train_args(words).parts
        assert parts["loss_fn"].key == "rm" and parts["prompt_fn"].key == "chat"
        given = parse_train_args([*words, "--loss-fn", "sft", "--prompt", "question"]).parts
        assert given["loss_fn"].key == "sft" and given["prompt"].key == "question"
        assert collate_fn_register["rm"].encode is encode_scored_pair


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--train-model", "reward", "--loss-fn", "sft"), "gives scores"),
        (("--train-model", "reward", "--save-best", "token_accuracy"), "Use --save-best loss"),
    ],
)
def test_what_does_not_go_with_scores_is_refused_before_anything_is_read(words, match):
    with restored_registers():
        engine_register.register("pipeline", len, replace=True)
        arguments = parse_train_args([*words, "--dataset", "jsonl", "--collate-fn", "rm"])
        with pytest.raises(UserError, match=match):
            check_scores(arguments)
