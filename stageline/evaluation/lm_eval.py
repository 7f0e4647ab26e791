"""Our models as a model of lm-evaluation-harness, so that its tasks run unmodified.

It asks an engine (`DecodingEngine`, or anything with its `answer` and `score`) for token ids that
are made as lm_eval's own `hf` model makes them: the same border between context and continuation,
the same beginning of a row, the same cut from the left. Needs the package lm_eval, so nothing else
may import this file at its top.
"""

import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from stageline.data.text.processor import get_tokenizer
from stageline.errors import UserError
from stageline.inference.decoding.request import Failed, Request, Sampling, ScoreRequest

NAME = "stageline"
MAX_GEN_TOKS = 256  # default for a task that names none; the same as in lm_eval's `hf`
# options of a task, with transformers' names, that Sampling has too
SHARED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# options of a task that must have these values: any other would change the answers
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
    num_prompt_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
) -> Sampling:
    """Return the sampling of an answer from a task's until, max_gen_toks, do_sample, top_p ...

    Args:
        stop_token_ids: ids that end an answer in any task.

    Raises:
        UserError: an option that Stageline's engines do not have.
    """
    kwargs = dict(normalize_gen_kwargs(options, MAX_GEN_TOKS))
    is_sampling = kwargs.pop("do_sample")
    temperature = float(kwargs.pop("temperature", 0.0))
    max_new_tokens = kwargs.pop("max_gen_toks")
    if "max_length" in kwargs:  # it counts prompt and answer
        max_new_tokens = int(kwargs.pop("max_length")) - num_prompt_tokens
    words, token_ids = [], []
    for word in filter(None, kwargs.pop("until")):
        ids = tokenizer.encode(word, add_special_tokens=False)
        if len(ids) == 1 and not tokenizer.decode(ids, skip_special_tokens=True):
            token_ids += ids  # a special token, which no text of an answer has
        else:
            words.append(word)
    shared = {name: kwargs.pop(name) for name in SHARED if kwargs.get(name) is not None}
    for name, value in kwargs.items():
        if name == "seed" or value is None:
            continue
        if name not in NEUTRAL:
            raise UserError(
                f"the task's generation_kwargs have {name}={value!r}. Override it, or take it out "
                "of the task: the engine knows until, max_gen_toks, do_sample, temperature, seed, "
                f"{', '.join(SHARED)}."
            )
        if NEUTRAL[name] and value not in NEUTRAL[name]:
            raise UserError(
                f"the task's generation_kwargs have {name}={value!r}. Override it with "
                f"{NEUTRAL[name][0]}: each prompt gets one answer, without a beam search."
            )
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature if is_sampling else 0.0,
        seed=int(kwargs.get("seed", seed)),
        stop=tuple(words),
        stop_token_ids=(*stop_token_ids, *token_ids),
        **shared,
    )


@register_model(NAME)
class StagelineLM(TemplateLM):
    """The lm_eval model "stageline": `lm_eval.simple_evaluate(StagelineLM(engine), ...)`."""

    def __init__(
        self,
        engine: Any,
        *,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        seed: int = 0,
        **ignored: Any,
    ) -> None:
        """See the class.

        Args:
            engine: has a processor, `max_length`, `answer` and `score`, as a DecodingEngine.
            max_length: the most tokens of a row; None: as many as the model has positions.
            add_bos_token: a row begins with it; None: as the tokenizer does.
            seed: of sampled answers; those of one task differ from each other nevertheless.
            ignored: batch_size, max_batch_size and device, which the engine settles itself.
        """
        super().__init__()
        self.engine = engine
        self.tokenizer = get_tokenizer(engine.processor)
        self.max_length = max_length or engine.max_length
        self.batch_size = ignored.get("batch_size") or "auto"
        self._add_bos_token = add_bos_token
        if add_bos_token is not None:
            self.tokenizer = copy.deepcopy(self.tokenizer)  # the engine has it too
            self.tokenizer.add_bos_token = add_bos_token
        # An engine's own stop ids include those of the model's generation config.
        own = getattr(engine, "stop_ids", ())
        self._stop_token_ids = tuple(sorted({*own, self.eot_token_id} - {None}))
        self._seed = seed

    @property
    def eot_token_id(self) -> int:
        """The id that ends an answer in every task."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a continuation that has no context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """A file name for lm_eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the messages as the model's chat template writes them."""
        fill = functools.partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return fill(chat_history)
        except jinja2.exceptions.TemplateError:  # one that knows no system role; as `hf`
            return fill([message for message in chat_history if message["role"] != "system"])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return token ids; a text that begins with the BOS token gets no second."""
        first_token = self.tokenizer.decode(self.prefix_token_id)
        return self._encode(string, first_token, add_special_tokens)

    def _encode(
        self, text: str, first_token: str | None, add_special_tokens: bool | None = None
    ) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = False if has_bos_prefix(text, first_token) else self._add_bos_token
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(text, **options)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        rows = []
        for index, (_, context, targets) in enumerate(requests):
            if not 0 < len(targets) <= self.max_length:
                raise UserError(
                    f"a task has a continuation of {len(targets)} tokens, and the model scores 1 "
                    f"to {self.max_length} at once. Shorten it in the task."
                )
            prompt = _as_prompt((context + targets)[-(self.max_length + 1) :])
            rows.append(ScoreRequest(str(index), prompt, num_targets=len(targets)))
        found: dict[int, tuple[float, bool]] = {}
        # longest first: what does not fit shows at once, and rows of a length run together
        rows.sort(key=lambda row: -row.prompt["input_ids"].shape[1])
        scored = _whole(self.engine.score(rows))
        for one in tqdm(scored, total=len(rows), disable=disable_tqdm, desc="log-likelihoods"):
            index = int(one.key)
            found[index] = (sum(one.logprobs), one.is_greedy)
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
        return [found[index] for index in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the longest row."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for index, (logprob, _) in zip(owners, found, strict=True):
            totals[index] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each prompt, up to the first stop text of its task."""
        asked = []
        for index, request in enumerate(requests):
            context, options = request.args
            # not tok_encode: as in `hf`, only the BOS token counts here, not its substitute
            ids = self._encode(context, self.tokenizer.bos_token)
            sampling = read_generation(
                options,
                tokenizer=self.tokenizer,
                num_prompt_tokens=len(ids),
                stop_token_ids=self._stop_token_ids,
                seed=self._seed + index,
            )
            room = self.max_length - sampling.max_new_tokens
            if room < 1:
                raise UserError(
                    f"max_gen_toks is {sampling.max_new_tokens} and the model has "
                    f"{self.max_length} positions. Lower it with `gen_kwargs`."
                )
            asked.append(Request(str(index), _as_prompt(ids[-room:]), sampling))
        asked.sort(key=lambda one: -one.prompt["input_ids"].shape[1])
        texts = [""] * len(requests)
        finished = _whole(self.engine.answer(asked))
        for one in tqdm(finished, total=len(asked), disable=disable_tqdm, desc="answers"):
            index = int(one.key)
            context, options = requests[index].args
            until = options.get("until")
            # cut again: a stop text that is a special token is not in the engine's text
            texts[index] = postprocess_generated_text(one.text, until, think_end_token=None)
            self.cache_hook.add_partial("generate_until", (context, options), texts[index])
        return texts


def _as_prompt(ids: list[int]) -> dict[str, torch.Tensor]:
    row = torch.tensor([ids], dtype=torch.long)
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


def _whole(events: Iterable[Any]) -> Iterator[Any]:
    """Yield events; a failure ends the evaluation, as figures need all rows."""
    for event in events:
        if isinstance(event, Failed):
            raise event.error
        yield event
