"""Examples before a question: which are drawn, and how chat and template write them."""

import json
from pathlib import Path

import pytest

from prompt_fn import chat, fill
from stageline.data.text.encode import encode_rendered
from stageline.errors import UserError
from stageline.evaluation.predictions import FewShot
from tests.helpers.small_run import ForkedRun, Job
from tests.helpers.tiny_models import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ROWS = [(None, {"id": str(i), "question": f"{i}?", "answer": str(i)}) for i in range(20)]
EXAMPLES = [
    {"id": "a", "question": "1?", "answer": "one"},
    {"id": "b", "question": "2?", "answer": "two"},
]
SAMPLE = {"id": "c", "question": "3?", "answer": "three", "num_images": 0}


def ids(examples):
    return [example["id"] for example in examples]


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_sample_is_never_its_own_example_and_the_draw_is_the_seeds(per_sample):
    def draw(seed, sample):
        return ids(FewShot(ROWS, count=5, seed=seed, per_sample=per_sample).of(sample))

    outside = [{"id": f"x{i}", "question": "new"} for i in range(30)]
    draws = [draw(0, sample) for sample in outside]
    assert all(len(set(one)) == 5 for one in draws)
    assert draws == [draw(0, sample) for sample in outside]
    assert len({tuple(one) for one in draws}) == (30 if per_sample else 1)
    assert draw(1, outside[0]) != draws[0]
    for _, sample in ROWS:
        assert sample["id"] not in draw(0, sample)
        twin = {**sample, "id": "another id, the same question"}
        assert sample["id"] not in draw(0, twin)


def test_too_few_and_pictures_are_refused():
    with pytest.raises(UserError, match="--num-fewshot 20: only 19 samples can stand before"):
        FewShot(ROWS, count=20, seed=0, per_sample=False).of(ROWS[3][1])
    with pytest.raises(UserError, match="samples without pictures"):
        FewShot([(["p.png"], ROWS[0][1])], count=1, seed=0, per_sample=False).of(SAMPLE)


def test_a_template_is_filled_for_each_example():
    template = "Question: [QUESTION]\nAnswer: [ANSWER]"
    rendered = fill(SAMPLE, template, for_generation=True, examples=EXAMPLES)
    assert rendered.text == (
        "Question: 1?\nAnswer: one\n\nQuestion: 2?\nAnswer: two\n\nQuestion: 3?\nAnswer:"
    )
    assert not any(piece.is_target for piece in rendered)
    learnt = fill(SAMPLE, template, examples=EXAMPLES)
    assert "".join(piece.text for piece in learnt if piece.is_target) == " three"


def test_examples_are_turns_of_a_chat(system="Be short."):
    tokenizer = tiny_tokenizer()
    rendered = chat(
        SAMPLE, "[QUESTION][ANSWER]", processor=tokenizer, for_generation=True, system=system,
        examples=[{**EXAMPLES[0], "system": "of the example"}, EXAMPLES[1]],
    )  # fmt: skip
    messages = [{"role": "system", "content": system}]
    for question, answer in (("1?", "one"), ("2?", "two"), ("3?", None)):
        messages.append({"role": "user", "content": question})
        messages += [{"role": "assistant", "content": answer}] if answer else []
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered.text == wanted
    assert encode_rendered(rendered, tokenizer).input_ids == tokenizer.encode(
        wanted, add_special_tokens=False
    )


def test_through_evaluate(tmp_path):
    job = Job(tmp_path, num_rows=10)

    def run(*options):
        words = [
            ROOT / "evaluate.py", "--engine", "device_map", "--model-path", job.model, "--dataset",
            "jsonl", "--dataset-path", job.rows, "--dataset.test_size", "4", "--prompt", "question",
            "--prompt-fn", "fill", "--image-token", "none", "--metric", "exact_match", "--device",
            "cpu", "--output-dir", tmp_path / "out", "--max-new-tokens", 2, "--bootstrap.resamples",
            10, *options,
        ]  # fmt: skip
        done = ForkedRun(list(map(str, words)), ranks=1).wait(60)
        lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
        return done, [json.loads(line) for line in lines]

    done, plain = run()
    assert done.code == 0 and len(plain) == 4, done.err
    done, shown = run("--num-fewshot", 2)
    assert done.code == 0 and len(shown) == 8, done.err  # another prompt is another question
    tested = {line["sample"]["question"] for line in plain}
    for line in shown[4:]:
        *examples, own = line["prompt"].split("\n\n")
        assert len(examples) == 2 and line["sample"]["question"] in own
        assert not any(question in example for question in tested for example in examples)
