"""Answers and scores with vLLM, behind the methods of `DecodingEngine`; a GPU and vLLM are needed.

vLLM reads a plain Hugging Face folder. It gets token ids, so that a prompt is what it is for every
other engine; images go along as they are, since vLLM has processors of its own.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stageline.data.batches.batch import Images
from stageline.data.text.encode import encode_rendered
from stageline.data.text.processor import get_image_processor, get_tokenizer, load_processor
from stageline.data.text.rendered import Rendered
from stageline.device import accelerators
from stageline.errors import UserError, package
from stageline.hub import title_of
from stageline.inference.decoding.request import (
    Failed,
    Finished,
    Request,
    Scored,
    ScoreRequest,
    TokenLogprob,
)
from stageline.inference.generation import stop_ids_of
from stageline.model_folder import load_config

IMAGES = "images"  # key of a prompt's images; its other values are tensors
MOST_AT_ONCE = 256  # requests that are handed over together; vLLM batches among these
SMALLEST = 1e-6
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class VllmEngine:
    """Answers and scores with `vllm.LLM`, which spreads a model over GPUs by tensor parallelism.

    Args:
        folder: a plain Hugging Face folder with weights and tokenizer.
        num_devices: GPUs; None: all of this machine.
        max_length: longest prompt with its answer, in tokens; None: as many as the model has.
        images_per_prompt: most images of a prompt.
        options: further arguments of `vllm.LLM`, such as quantization or enforce_eager.

    Raises:
        UserError: vLLM isn't installed, or the folder can't be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_devices: int | None = None,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        images_per_prompt: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        self._vllm = check_vllm()
        self.config = load_config(folder, trust_remote_code=trust_remote_code)
        self.processor = load_processor(folder, trust_remote_code=trust_remote_code)
        self.num_devices = num_devices or max(1, len(accelerators()))
        if images_per_prompt is not None:
            options["limit_mm_per_prompt"] = {"image": images_per_prompt}
        self.llm = self._vllm.LLM(
            model=str(folder),
            tokenizer=str(folder),
            tensor_parallel_size=self.num_devices,
            dtype="auto" if dtype is None else DTYPES[dtype],
            max_model_len=max_length,
            trust_remote_code=trust_remote_code,
            **options,
        )
        self.tokenizer = get_tokenizer(self.processor)
        self.model_name = title_of(folder)
        # they end an answer, where a request names none, in addition to those that vLLM finds
        self.stop_ids = stop_ids_of(folder, self.config, self.processor)
        self.max_length = max_length or int(self.llm.llm_engine.model_config.max_model_len)

    @property
    def max_scored(self) -> int:
        """Tokens before the last one of a row that is scored; one more is made behind it."""
        return self.max_length - 2

    def encode(self, rendered: Rendered, images: Images = None) -> dict[str, Any]:
        """Return the prompt of a `Request` for this engine.

        The text of an image stays one placeholder, which vLLM itself writes out.
        """
        ids = encode_rendered(rendered, self.processor).input_ids
        prompt: dict[str, Any] = {"input_ids": torch.tensor([ids], dtype=torch.long)}
        if images:
            prompt[IMAGES] = list(images)
        return prompt

    def answer(self, requests: Iterable[Request]) -> Iterator[Finished | Failed]:
        """Answers requests, some hundred at a time, in their order."""
        return self._each(requests, self._sampling_params, self._finished)

    def score(self, items: Iterable[ScoreRequest]) -> Iterator[Scored | Failed]:
        """Scores the last tokens of rows; vLLM reads them as prompts and makes one token more."""
        params = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        return self._each(items, lambda _: params, _scored)

    def _each(self, items: Iterable[Any], params: Any, result: Any) -> Iterator[Any]:
        """Yield `result` of each item and its output; failures of a portion come first."""
        source = iter(items)
        while together := list(itertools.islice(source, MOST_AT_ONCE)):
            good, prompts = [], []
            for item in together:
                try:
                    prompts.append(self._prompt(item.prompt))
                    good.append(item)
                except UserError as error:
                    yield Failed(item.key, error)
            if good:
                chosen = [params(item) for item in good]
                outputs = self.llm.generate(prompts, chosen, use_tqdm=False)
                yield from map(result, good, outputs)

    def _prompt(self, prompt: Mapping[str, Any]) -> Any:
        ids = prompt["input_ids"][0].tolist()
        if not 0 < len(ids) < self.max_length:
            raise UserError(
                f"The prompt has {len(ids)} tokens; with its answer the model reads "
                f"{self.max_length}. Shorten it."
            )
        images = prompt.get(IMAGES)
        if not images:
            return self._vllm.TokensPrompt(prompt_token_ids=ids)
        if get_image_processor(self.processor) is None:
            raise UserError("The prompt has images, but this model takes only text.")
        return self._vllm.TokensPrompt(
            prompt_token_ids=ids, multi_modal_data={"image": list(images)}
        )

    def _sampling_params(self, request: Request) -> Any:
        sampling = request.sampling
        ends = self.stop_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
        return self._vllm.SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=max(sampling.top_p, SMALLEST),  # 0 is refused; the likeliest token is left
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            seed=sampling.seed,
            stop=list(sampling.stop) or None,
            stop_token_ids=list(ends) or None,
            ignore_eos=sampling.stop_token_ids is not None,
            min_tokens=sampling.min_new_tokens,
            logprobs=sampling.logprobs,
        )

    def _finished(self, request: Request, output: Any) -> Finished:
        found = output.outputs[0]
        ids, stopped_by = list(found.token_ids), found.stop_reason
        ends = {*self.stop_ids, self.tokenizer.eos_token_id}
        if request.sampling.stop_token_ids is not None:
            ends = set(request.sampling.stop_token_ids)
        num_top = request.sampling.logprobs or 0  # where none are asked for none are found
        logprobs = [
            _logprob(token_id, there, num_top)
            for token_id, there in zip(ids, found.logprobs or (), strict=False)
        ]
        if found.finish_reason == "stop" and ids and ids[-1] in (stopped_by, *ends):
            # vLLM keeps the token that ended an answer, and names none where it was the usual one
            stopped_by = stopped_by if isinstance(stopped_by, str) else ids[-1]
            if not isinstance(stopped_by, str):
                ids, logprobs = ids[:-1], logprobs[:-1]
        return Finished(
            request.key,
            "length" if found.finish_reason == "length" else "stop",
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(found.token_ids),
            text=found.text,
            token_ids=tuple(ids),
            stopped_by=stopped_by,
            logprobs=tuple(logprobs),
        )


def _scored(item: ScoreRequest, output: Any) -> Scored:
    """Return a row's scores from vLLM's log-probabilities of its prompt."""
    count = item.num_targets
    pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[-count:]
    return Scored(
        item.key,
        tuple(there[token_id].logprob for token_id, there in pairs),
        is_greedy=all(there[token_id].rank == 1 for token_id, there in pairs),
    )


def _logprob(token_id: int, there: Mapping[int, Any], num_top: int) -> TokenLogprob:
    """Return the log-probability of a token, which vLLM always adds, and of the likeliest ones."""
    top = sorted(there.items(), key=lambda pair: pair[1].rank)
    likeliest = tuple((other, value.logprob) for other, value in top if value.rank <= num_top)
    return TokenLogprob(token_id, there[token_id].logprob, likeliest)


def check_vllm() -> Any:
    """The package, or a UserError that says how to install it."""
    other = "use another engine such as pipeline; vLLM needs a GPU"
    return package("vllm", "the engine vllm", pip="'stageline[vllm]'", instead=other)
