"""How far log-probabilities of cached decoding lie from those of a training pass.

By dtype, with the LM head in the half type and in float32. Tiny random models answer prompts in
groups (two stages, sampling at temperature 1), and the same stages score the answers in a forward
of whole rows. Answers with a token that stands for an image are left out.
Usage: python benchmarks/grpo_gap.py [families or model folders ...]
"""

import functools
import sys
import tempfile
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pp_models  # noqa: F401, E402 (puts the parts on the shelf)
from prompt_fn import auto, chat  # noqa: E402
from register import train_model_register  # noqa: E402
from stageline.checkpoint.load import quiet  # noqa: E402
from stageline.data.images.images import ImageExpander  # noqa: E402
from stageline.data.text.processor import get_tokenizer, save_processor  # noqa: E402
from stageline.inference.decoding.answer_groups import AnswerGroups, PromptToAnswer  # noqa: E402
from stageline.inference.decoding.chain import LocalChain  # noqa: E402
from stageline.inference.decoding.request import Sampling  # noqa: E402
from stageline.inference.decoding.stage_decoder import StageDecoder, answering  # noqa: E402
from tests.helpers import decoded_models  # noqa: E402
from tests.helpers.decoding_engines import built_stages  # noqa: E402
from tests.helpers.pictured_prompts import pictured_prompts  # noqa: E402
from tests.helpers.tiny_models import DECODERS  # noqa: E402
from tools import tiny_model  # noqa: E402

FAMILIES = ("llama", "qwen3", "gemma3", "qwen3_moe", "gpt2", "qwen2_vl")
SEEING = ("internvl", "qwen2_vl")
CASES = (  # dtype, whether the head computes in float32
    *((torch.bfloat16, False), (torch.bfloat16, True)),
    *((torch.float16, False), (torch.float16, True)),
)
TEXTS = ("What is the capital of France?", "Name three colours of the rainbow and say why.")
MOST, GROUP = 48, 8


def main(families: list[str]) -> None:
    """Prints a line of a table for each family, dtype and head."""
    print(
        "| family | dtype | head | rows, tokens | mean | largest | outside | ratio of an answer |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for family in families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder, quiet():
            if Path(family).is_dir():
                model = model_of_folder(Path(family))
            elif family in SEEING:
                encode = functools.partial(pictured_prompts, prompt_fn=chat, image_token=auto)
                model = decoded_models.decoded_vision_model(family, Path(folder), encode=encode)
            elif family in DECODERS and family != "qwen3_moe":
                model = decoded_models.decoded_text_model(family, Path(folder), num_prompts=4)
            else:
                model = shrunk_model(family, Path(folder))
            for dtype, is_wide in CASES:
                print(line(model, family, dtype, is_wide=is_wide), flush=True)


def shrunk_model(family: str, folder: Path) -> decoded_models.DecodedModel:
    """A scaled-down model of any family at random, with the prompts of the others."""
    config, tokenizer = tiny_model.make(family)
    if family == "qwen3_moe":
        config.moe_intermediate_size = 16  # products over experts need rows of 16 bytes
    decoded_models._make_model(family, config, 0).save_pretrained(folder)
    save_processor(tokenizer, folder)
    prompts = decoded_models.text_prompts((1, 40, 7, 23), vocab_size=len(tokenizer))
    return decoded_models.DecodedModel(family, folder, tokenizer, prompts, ())


def model_of_folder(folder: Path) -> decoded_models.DecodedModel:
    """A model with a chat template, and two questions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turns = ([{"role": "user", "content": text}] for text in TEXTS)
    given = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    prompts = tuple(dict(tokenizer.apply_chat_template(one, **given)) for one in turns)
    return decoded_models.DecodedModel(folder.name, folder, tokenizer, prompts, ())


def line(
    model: decoded_models.DecodedModel, family: str, dtype: torch.dtype, *, is_wide: bool
) -> str:
    """The figures of one family in one dtype."""
    key = "vision_language" if family in SEEING else "causal_lm"
    methods = {"upcast_lm_head": is_wide}
    stages = built_stages(train_model_register[key], model.folder, 2, dtype=dtype, methods=methods)
    groups = AnswerGroups(
        LocalChain([StageDecoder(stage, trains_on=True) for stage in stages]),
        tokenizer=get_tokenizer(model.processor),
        stop_ids=(),
        device=torch.device("cpu"),
        lots_at_once=2,
        most_on_way=4,
    )
    prompts = [
        PromptToAnswer(cast(prompt, dtype), tuple(range(GROUP * n, GROUP * (n + 1))))
        for n, prompt in enumerate(model.prompts)
    ]
    sampling = Sampling(max_new_tokens=MOST, temperature=1.0)
    with answering(stages):
        found = groups.draw(prompts, sampling, lot_size=len(prompts))
    gaps, ratios = [], []
    expander = ImageExpander.of(model.processor)
    ids = frozenset() if expander is None else expander.own_ids()
    for prompt, answers in zip(prompts, found, strict=True):
        group = [answer for answer in answers if ids.isdisjoint(answer.token_ids)]
        if not group:
            continue
        own = torch.tensor([answer.token_ids for answer in group])
        drawn = torch.tensor([answer.log_probs for answer in group])
        if "pixel_values" in prompt.inputs:  # rows with an image: one at a time
            scored = torch.cat([score(stages, prompt.inputs, row[None]) for row in own])
        else:
            scored = score(stages, prompt.inputs, own)
        gaps.append((scored - drawn).flatten())
        ratios.append((scored - drawn).sum(dim=1).exp())
    gap, ratio = torch.cat(gaps), torch.cat(ratios)
    is_out = (gap.exp() < 0.8) | (gap.exp() > 1.2)  # the clip range of GRPO
    return (
        f"| {model.family} | {str(dtype)[6:]} | {'float32' if is_wide else 'half'} | "
        f"{len(ratio)}, {len(gap)} | {gap.abs().mean():.1e} | {gap.abs().max():.1e} | "
        f"{100 * is_out.double().mean():.2f} % | {ratio.min():.4f} to {ratio.max():.4f} |"
    )


def cast(prompt: decoded_models.Prompt, dtype: torch.dtype) -> decoded_models.Prompt:
    """Pixels in the model's dtype."""
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in prompt.items()}


@torch.no_grad()
def score(stages: list, inputs: decoded_models.Prompt, own: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [B, T] of answers by a forward of whole rows, as training does."""
    ids = torch.cat([inputs["input_ids"].expand(len(own), -1), own], dim=1)
    batch = {n: v for n, v in inputs.items() if n not in ("input_ids", "attention_mask")}
    for name, value in batch.items():
        if value.shape == inputs["input_ids"].shape:
            rows = value.expand(len(own), -1)
            batch[name] = torch.cat([rows, torch.zeros_like(own)], dim=1)
    given = {**batch, "attention_mask": torch.ones_like(ids)}
    out: tuple = (ids,)
    for stage in stages:
        found = stage(*out, **given, **({} if stage.is_first else {"input_ids": ids}))
        out = found if isinstance(found, tuple) else (found,)
    logits = out[0][:, -own.shape[1] - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, own[..., None])[..., 0]


if __name__ == "__main__":
    main(sys.argv[1:])
