"""Chat templates by name: the published texts, what a tokenizer lacks, and what is saved."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    SequenceBiasLogitsProcessor,
)

from benchmarks import chat_masks
from commands.stages import prepare_texts
from options.parts import chosen_part
from prompt_fn import chat
from stageline.checkpoint.plain_folder import export_folder
from stageline.data.text.chat import turn_ends
from stageline.data.text.chat_template import ChatTemplate, fitting_templates, use_template
from stageline.errors import UserError
from stageline.inference.generation import stop_ids_of, stop_token_ids
from tests.helpers.chat_samples import SAMPLES, row, say
from tests.helpers.chat_templates import BASE, FORMATS, format_tokenizer
from tests.helpers.small_run import OPTIONS, Job
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

TEMPLATES = Path(__file__).parents[2] / "stageline" / "data" / "text" / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TURNS = [say("user", "Which digit?"), say("assistant", "Seven."), say("user", "Sure?"),
         say("assistant", "Yes")]  # fmt: skip
BRIEF = say("system", "Be brief.")
# written by hand from what each format's authors publish: (text of a conversation with a system
# message, what comes before an answer)
WRITTEN = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhich digit?<|im_end|>\n"
        "<|im_start|>assistant\nSeven.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhich digit? [/INST] Seven. </s>"
        "<s>[INST] Sure? [/INST] Yes </s>",
        "",
    ),
    "mistral": (
        "<s>[INST] Be brief.\n\nWhich digit?[/INST] Seven.</s>[INST] Sure?[/INST] Yes</s>",
        "",
    ),
    "vicuna": (
        "<s>Be brief. USER: Which digit? ASSISTANT: Seven.</s>USER: Sure? ASSISTANT: Yes</s>",
        "ASSISTANT:",
    ),
    "alpaca": (
        "<s>Be brief.\n\n### Instruction:\nWhich digit?\n\n### Response:\nSeven.</s>\n\n"
        "### Instruction:\nSure?\n\n### Response:\nYes</s>\n\n",
        "### Response:\n",
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Which digit?"
        "<|im_end|><|im_start|>assistant<|im_sep|>Seven.<|im_end|><|im_start|>user<|im_sep|>Sure?"
        "<|im_end|><|im_start|>assistant<|im_sep|>Yes<|im_end|>",
        "<|im_start|>assistant<|im_sep|>",
    ),
    "plain": ("<s>Be brief.Which digit?Seven.</s>Sure?Yes</s>", ""),
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nWhich digit?</s>\n<|assistant|>\nSeven.</s>\n"
        "<|user|>\nSure?</s>\n<|assistant|>\nYes</s>\n",
        "<|assistant|>\n",
    ),
}
# Stageline's name -> the name of the published text in the package trl
PUBLISHED = {"qwen": "qwen2_5", "llama3": "llama3", "gemma": "gemma3", "phi3": "phi3_5",
             "deepseek": "deepseekv3"}  # fmt: skip


def tokenizer_for(name):
    needed = (TEMPLATES / f"{name}.jinja").read_text().partition("-#}")[0].split()[2:]
    return tiny_tokenizer(special_tokens=[*BASE, *needed], adds_bos=True, chat_template=None)


def published(name):
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{PUBLISHED[name]}.jinja").read_text()


def test_each_has_a_reference():
    assert sorted({*WRITTEN, *PUBLISHED}) == NAMES


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("sample", ["multi", "system", "unicode", "spaces", "tools"])
def test_the_text_is_that_of_the_published_template(name, sample):
    if sample == "tools" and name != "qwen":
        pytest.skip("without tools of its own")
    tokenizer, given = tokenizer_for(name), row(sample)
    use_template(tokenizer, template=name)
    for count, asks in ((len(given["messages"]), False), (len(given["messages"]) - 1, True)):
        messages, more = given["messages"][:count], {"tools": given.get("tools"), "tokenize": False}
        ours, theirs = (
            tokenizer.apply_chat_template(
                messages, chat_template=text, add_generation_prompt=asks, **more
            )
            for text in (tokenizer.chat_template, published(name))
        )
        if name == "deepseek" and asks:  # R1's, which opens a thought
            theirs = theirs.removesuffix("<think>\n")
        assert ours == theirs


@pytest.mark.parametrize("name", WRITTEN)
def test_the_text_is_what_the_format_says(name):
    tokenizer = tokenizer_for(name)
    text, asks = WRITTEN[name]
    rendered = chat({"messages": [BRIEF, *TURNS]}, "", processor=tokenizer, template=name)
    assert rendered.text == text
    prompt = chat(
        {"messages": [BRIEF, *TURNS]}, "", processor=tokenizer, template=name, for_generation=True
    ).text
    assert text.startswith(prompt) and prompt.endswith(asks) and "Yes" not in prompt


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sample", ["multi", "special"])
def test_rows_can_be_learnt_and_each_answer_ends(name, sample):
    tokenizer = tokenizer_for(name)
    rendered = chat(row(sample), "", processor=tokenizer, template=name)
    learnt = [piece.text for piece in rendered if piece.is_target and piece.is_user]
    answers = [m["content"] for m in SAMPLES[sample] if m["role"] == "assistant"]
    assert [text.strip() for text in learnt] == [text.strip() for text in answers]
    ends = [piece.text for piece in rendered if piece.is_target and not piece.is_user]
    ending = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>")
    assert sum(text.strip().endswith((*ending, "<｜end▁of▁sentence｜>")) for text in ends) == len(
        answers
    )


def test_what_a_tokenizer_lacks_is_named_with_what_fits():
    tokenizer = tiny_tokenizer(special_tokens=[*BASE, "<|im_start|>"], chat_template=None)
    with pytest.raises(UserError, match=r"has no <\|im_end\|>\..*llama2, plain, vicuna, zephyr"):
        use_template(tokenizer, template="chatml")
    assert tokenizer.chat_template is None
    with pytest.raises(
        UserError, match="template chat-ml is not known. Choose one of alpaca, chatml, deepseek"
    ):
        use_template(tokenizer, template="chat-ml")
    with pytest.raises(UserError, match="Name one, .*template alpaca or llama2 or plain or vicuna"):
        ChatTemplate.of(tokenizer)
    assert fitting_templates(tokenizer) == ["alpaca", "llama2", "plain", "vicuna", "zephyr"]


def test_a_trained_checkpoint_brings_its_template(tmp_path):
    job = Job(tmp_path)
    tiny_tokenizer(chat_template=None).save_pretrained(job.model)
    (job.model / "chat_template.jinja").unlink(missing_ok=True)
    fill = OPTIONS[OPTIONS.index("--prompt") : OPTIONS.index("--image-token")]
    assert fill == ["--prompt", "question", "--prompt-fn", "fill"]
    more = ("--prompt", "chat", "--prompt-fn", "chat", "--total-steps", 1)
    done = job.fork("none", *more, ranks=1)
    assert done.code == 2 and "--prompt-fn.template alpaca or chatml or" in done.err, done.err
    done = job.fork("first", *more, "--prompt-fn.template", "chatml", ranks=1)
    assert done.code == 0, done.err
    folder = job.folder / "first" / "checkpoints" / "step-00000001"
    saved = AutoTokenizer.from_pretrained(folder)
    assert saved.chat_template.strip() == (TEMPLATES / "chatml.jinja").read_text().strip()
    export_folder(folder, tmp_path / "exported")
    for each in (folder, tmp_path / "exported"):
        assert ends_of(each, saved) == {"</s>", "<|im_end|>"}
        assert AutoTokenizer.from_pretrained(each).eos_token == "<|im_end|>"


def ends_of(folder, tokenizer):
    """Return the tokens at which plain transformers stops, if the model writes them."""
    assert set(tokenizer.all_special_ids) < set(range(6))
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = set()
    for token in range(6):  # special tokens come first
        force = [SequenceBiasLogitsProcessor([[[token], 1e9]])]
        answer = model.generate(torch.tensor([[9]]), logits_processor=force, max_new_tokens=2)
        if answer.shape[1] == 2:
            found.add(tokenizer.convert_ids_to_tokens(token))
    return found


# name of a template -> tokens that end answers besides the tokenizer's own
ENDS = {
    "chatml": "<|im_end|>", "qwen": "<|im_end|>", "llama3": "<|eot_id|>", "phi4": "<|im_end|>",
    "gemma": "<end_of_turn>", "phi3": "<|end|>", "deepseek": "<｜end▁of▁sentence｜>",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_ends_a_turn_ends_an_answer(name):
    """Stop at it for each caller: a model in this process, a folder's engine, an open engine."""
    tokenizer = tokenizer_for(name)
    engine = SimpleNamespace(stop_ids=(2,))
    part = chosen_part("prompt_fn", "chat", {"template": name})
    prepare_texts(part, tokenizer, engine)
    ids = {2, tokenizer.convert_tokens_to_ids(ENDS.get(name, "</s>"))}
    assert set(engine.stop_ids) == ids
    config = tiny_config("llama")
    assert set(stop_ids_of(Path("nowhere"), config, tokenizer)) == ids
    model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=2))
    assert set(stop_token_ids(model, tokenizer)) == ids
    # the tokenizer's end token is the template's
    assert (tokenizer.eos_token == "</s>") == (name not in ENDS or name == "phi3")


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("channels", ("<|return|>", "<|call|>")),  # <|end|> comes behind thoughts too
        ("glm4moe", ("<|endoftext|>", "<|user|>", "<|observation|>")),
        ("cohere2", ("<|END_OF_TURN_TOKEN|>",)),
        ("nemotron_3_nano", ("<|im_end|>",)),  # refuses rows without thoughts
        ("unstable", ()),
    ],
)
def test_ends_are_read_off_the_template(name, ends):
    is_ours = name in FORMATS
    tokenizer = format_tokenizer(name) if is_ours else chat_masks.tokenizer_of(name)
    assert turn_ends(tokenizer) == ends
    tokenizer.chat_template = None
    assert turn_ends(tokenizer) == ()
