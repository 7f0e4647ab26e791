"""Our models as a model of lm-evaluation-harness, so that its tasks run unmodified.

It asks an engine (`DecodingEngine`, or anything with its `answer` and `score`) for token ids that
are made as lm_eval's own `hf` model makes them: the same border between context and continuation,
the same beginning of a row, the same cut from the left. Needs the package lm_eval, so nothing else
may import this file at its top.
"""

import copy
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jinja2
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from tqdm import tqdm

from stageline.data.text.processor import get_tokenizer
from stageline.errors import UserError
from stageline.inference.decoding.request import (
    Failed,
    Finished,
    Request,
    Sampling,
    Scored,
    ScoreRequest,
)

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


NAME = "stageline"
MAX_GEN_TOKS = 256  # of a task that names none; as `hf`


class ScoringEngine(Protocol):
    """What this file wants of an engine."""

    processor: Any
    max_length: int

    def answer(self, requests: Iterable[Request]) -> Iterator[Finished | Failed]: ...

    def score(self, items: Iterable[ScoreRequest]) -> Iterator[Scored | Failed]: ...


@register_model(NAME)
class StagelineLM(TemplateLM):
    """For `lm_eval.simple_evaluate(StagelineLM(engine), ...)`, or by its key "stageline"."""

    def __init__(
        self,
        engine: ScoringEngine,
        *,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,
        chat_template_args: dict[str, Any] | None = None,
        **ignored: Any,
    ) -> None:
        """See the class.

        Args:
            max_length: the most tokens of a row; None: as many as the model has positions.
            add_bos_token: whether a row begins with it; None: as the tokenizer does.
            prefix_token_id: stands before a continuation without context; None: the
                beginning-of-sequence token, or where there is none, the end-of-sequence token.
            seed: of sampled answers; those of one task differ from each other nevertheless.
            chat_template_args: further variables of the chat template.
            ignored: batch_size, max_batch_size and device, which the engine settles itself.
        """
        super().__init__()
        unknown = sorted(set(ignored) - {"batch_size", "max_batch_size", "device"})
        if unknown:
            raise UserError(
                f"{', '.join(unknown)} came as an argument of the lm_eval model {NAME}, which has "
                "no such argument: leave it out."
            )
        self.engine = engine
        self.tokenizer = get_tokenizer(engine.processor)
        self.max_length = max_length or engine.max_length
        self.max_gen_toks = max_gen_toks
        self.batch_size = ignored.get("batch_size") or "auto"
        self._add_bos_token = add_bos_token
        if add_bos_token is not None:
            self.tokenizer = copy.deepcopy(self.tokenizer)  # the engine has it too
            self.tokenizer.add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        # those of the model's generation config are among an engine's own
        own = getattr(engine, "stop_ids", ())
        self._stop_token_ids = tuple(sorted({*own, self.eot_token_id} - {None}))
        self._seed = seed
        self._chat_template_args = chat_template_args or {}

    @property
    def eot_token_id(self) -> int:
        """Ends an answer, whatever a task says besides."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Stands before a continuation that has no context."""
        known = (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next(token_id for token_id in known if token_id is not None)

    @property
    def tokenizer_name(self) -> str:
        """A file name for lm_eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The messages as the model's chat template writes them."""
        try:
            return self._fill_template(chat_history, add_generation_prompt)
        except jinja2.exceptions.TemplateError:  # one that knows no system role; as `hf`
            rest = [message for message in chat_history if message["role"] != "system"]
            return self._fill_template(rest, add_generation_prompt)

    def _fill_template(self, messages: list[dict[str, str]], is_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=is_prompt,
            continue_final_message=not is_prompt,
            **self._chat_template_args,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; a text that begins with the beginning-of-sequence token gets no second."""
        options = {}
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        elif has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            options["add_special_tokens"] = False
        elif self._add_bos_token is not None:
            options["add_special_tokens"] = self._add_bos_token
        return self.tokenizer.encode(string, **options)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        rows = [self._score_request(index, *row[1:]) for index, row in enumerate(requests)]
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

    def _score_request(self, index: int, context: list[int], targets: list[int]) -> ScoreRequest:
        if not 0 < len(targets) <= self.max_length:
            raise UserError(
                f"a continuation of {len(targets)} tokens came from a task. 1 to "
                f"{self.max_length} were expected, because that is how many the model can score "
                "at once: shorten it in the task."
            )
        row = (context + targets)[-(self.max_length + 1) :]
        return ScoreRequest(str(index), _as_prompt(row), num_targets=len(targets))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of each whole text, in windows of as many tokens as a row may have."""
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
        """An answer to each prompt, up to the first stop text of its task."""
        asked = [self._request(index, *request.args) for index, request in enumerate(requests)]
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

    def _request(self, index: int, context: str, options: dict[str, Any]) -> Request:
        ids = self._encode_context(context)
        sampling = read_generation(
            options,
            tokenizer=self.tokenizer,
            max_gen_toks=self.max_gen_toks,
            num_prompt_tokens=len(ids),
            stop_token_ids=self._stop_token_ids,
            seed=self._seed + index,
        )
        room = self.max_length - sampling.max_new_tokens
        if room < 1:
            raise UserError(
                f"max_gen_toks is {sampling.max_new_tokens} and the model has {self.max_length} "
                "positions. Fewer were expected, because the prompt needs one at least: lower "
                "max_gen_toks in the task or with `gen_kwargs`."
            )
        return Request(str(index), _as_prompt(ids[-room:]), sampling)

    def _encode_context(self, context: str) -> list[int]:
        # not tok_encode: `hf` asks for the very token here, not for what stands in its place
        if has_bos_prefix(context, self.tokenizer.bos_token):
            return self.tokenizer.encode(context, add_special_tokens=False)
        if self._add_bos_token is not None:
            return self.tokenizer.encode(context, add_special_tokens=self._add_bos_token)
        return self.tokenizer.encode(context)


def _as_prompt(ids: list[int]) -> dict[str, torch.Tensor]:
    row = torch.tensor([ids], dtype=torch.long)
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


def _whole(events: Iterable[Any]) -> Iterator[Any]:
    """The events; an evaluation with a missing row has no figures, so a failure ends it."""
    for event in events:
        if isinstance(event, Failed):
            raise event.error
        yield event


@dataclass(frozen=True)
class TaskSettings:
    """What `lm_eval.simple_evaluate` is told beside model and tasks, under its own names."""

    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True
    gen_kwargs: str | None = None
    confirm_run_unsafe_code: bool = False
    log_samples: bool = False


def check_lm_eval() -> None:
    """Says how to get lm_eval where it is missing; loads nothing.

    Raises:
        UserError: it isn't installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "the package lm_eval is not installed, it was expected, because it brings the tasks: "
            "pip install 'stageline[lm-eval]'."
        )


def find_tasks(names: Sequence[str], *, include_path: str | Path | None = None) -> Any:
    """lm_eval's manager of tasks, which knows all of these.

    Args:
        names: of tasks, groups or tags.
        include_path: folder with tasks of one's own; lm_eval's are looked at (which takes some
            seconds) where these aren't enough.

    Raises:
        UserError: nobody has such a task.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if not _missing(own, names):
            return own
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    missing = _missing(manager, names)
    if missing:
        where = f"lm_eval and {include_path}" if include_path else "lm_eval"
        raise UserError(
            f"{where} has no task {', '.join(missing)}. Names of tasks, groups or tags were "
            "expected: `lm_eval ls tasks` lists those of lm_eval; give the folder of your own YAML "
            "files with `include_path`."
        )
    return manager


def _missing(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not manager.match_tasks([name])]


def run_tasks(
    engine: Any,
    names: Sequence[str],
    *,
    manager: Any,
    settings: TaskSettings,
    add_bos_token: bool | None = None,
    seed: int = 0,
    described: Mapping[str, Any] = {},
    output_path: str | Path | None = None,
) -> dict[str, Any]:
    """Asks all questions of the tasks.

    Args:
        manager: what `find_tasks` found.
        seed: of sampled answers; that of examples is lm_eval's own, so that figures compare.
        described: the model in the words of the results file; its `pretrained` names a folder.
        output_path: folder of results_DATE.json, and samples_TASK_DATE.jsonl where they are logged.

    Returns:
        What `lm_eval.simple_evaluate` returns.
    """
    import lm_eval
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=None if output_path is None else str(output_path))
    names = [name for pattern in names for name in manager.match_tasks([pattern])]
    results = lm_eval.simple_evaluate(
        StagelineLM(engine, add_bos_token=add_bos_token, seed=seed),
        model_args=dict(described),
        tasks=list(dict.fromkeys(names)),
        task_manager=manager,
        evaluation_tracker=tracker,
        **vars(settings),
    )
    samples = results.pop("samples", None)
    tracker.save_results_aggregated(results=results, samples=samples)
    if samples is not None:
        for name in results["configs"]:
            tracker.save_results_samples(task_name=name, samples=samples[name])
        results["samples"] = samples
    return results


def results_table(results: dict[str, Any]) -> str:
    """The figures as lm_eval prints them; of groups too."""
    kinds = ["results", *(["groups"] if "groups" in results else [])]
    return "\n".join(make_table(results, kind) for kind in kinds)
