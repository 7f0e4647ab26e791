"""The generation options of an lm_eval task -> how our engine samples.

Not here: prompts and scores (lm_eval_model.py).
"""

from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from stageline.errors import UserError
from stageline.inference.decoding.request import Sampling

# what a task may say, under the names of transformers, that Sampling knows too
SHARED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# what a task may say and what it has to be then: anything else would change the answers
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "n": (1,),
    "use_cache": (True, False),
    "early_stopping": (True, False),
    "length_penalty": (1, 1.0),
    "pad_token_id": (),
}


def read_generation(
    options: dict[str, Any],
    *,
    tokenizer: Any,
    max_gen_toks: int,
    num_prompt_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
) -> Sampling:
    """How an answer is sampled.

    Args:
        options: of the task: until, max_gen_toks, do_sample, temperature, top_p ...
        max_gen_toks: where the task names none.
        stop_token_ids: end an answer in any task.

    Raises:
        UserError: an option that no engine of ours has.
    """
    kwargs = dict(normalize_gen_kwargs(options, max_gen_toks))
    is_sampling = kwargs.pop("do_sample")
    temperature = float(kwargs.pop("temperature", 0.0))
    max_new_tokens = kwargs.pop("max_gen_toks")
    if "max_length" in kwargs:  # of prompt and answer
        max_new_tokens = int(kwargs.pop("max_length")) - num_prompt_tokens
    words, token_ids = _split_stops(kwargs.pop("until"), tokenizer)
    shared = {name: kwargs.pop(name) for name in SHARED if kwargs.get(name) is not None}
    _refuse_unknown(kwargs)
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature if is_sampling else 0.0,
        seed=int(kwargs.get("seed", seed)),
        stop=words,
        stop_token_ids=(*stop_token_ids, *token_ids),
        **shared,
    )


def _split_stops(until: list[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop texts, and the ids of those that are a special token: no text of an answer has these."""
    words, token_ids = [], []
    for word in filter(None, until):
        ids = tokenizer.encode(word, add_special_tokens=False)
        if len(ids) == 1 and not tokenizer.decode(ids, skip_special_tokens=True):
            token_ids += ids
        else:
            words.append(word)
    return tuple(words), tuple(token_ids)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name == "seed" or value is None:
            continue
        if name not in NEUTRAL:
            raise UserError(
                f"the task's generation_kwargs have {name}={value!r}. Of until, max_gen_toks, "
                f"do_sample, temperature, seed, {', '.join(SHARED)} were expected, because the "
                "engine knows no other: take it out of the task, or override it."
            )
        if NEUTRAL[name] and value not in NEUTRAL[name]:
            raise UserError(
                f"the task's generation_kwargs have {name}={value!r}, {NEUTRAL[name][0]} was "
                "expected: each prompt gets one answer, without a beam search. Override it."
            )
