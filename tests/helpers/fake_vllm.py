"""Stands in for the package vllm, which needs a GPU: its names, answered by a whole model.

Arguments are checked against those of vLLM 0.10 to 0.20 as documented; what real vLLM computes is
not shown by it.
"""

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stageline.inference.decoding.request import Request
from stageline.inference.decoding.request import Sampling as OurSampling
from tests.helpers.whole_engine import WholeEngine

ENGINE_ARGUMENTS = {"pipeline_parallel_size", "max_model_len", "limit_mm_per_prompt"}


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids."""

    prompt_token_ids: list[int]
    multi_modal_data: dict[str, Any]


@dataclass
class SamplingParams:
    """The fields that are documented and that our engine may use."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")


@dataclass
class Logprob:
    """One token in one place."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LLM:
    """Loads a folder; every call is kept in `LLM.calls`."""

    calls: list[dict[str, Any]] = []

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        unknown = set(kwargs) - ENGINE_ARGUMENTS
        if unknown:
            raise TypeError(f"EngineArgs.__init__() got unexpected arguments {unknown}")
        self.arguments = {**locals(), **kwargs}
        whole = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, local_files_only=True
        )
        self.whole = WholeEngine(
            whole, AutoTokenizer.from_pretrained(tokenizer or model, local_files_only=True)
        )
        most = kwargs.get("max_model_len") or self.whole.max_length
        config = types.SimpleNamespace(max_model_len=most)
        self.llm_engine = types.SimpleNamespace(model_config=config)

    def generate(
        self,
        prompts: Sequence[TokensPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Any]:
        """Return an output for each prompt, in their order."""
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        LLM.calls.append({"prompts": prompts, "params": sampling_params})
        pairs = zip(prompts, sampling_params, strict=True)
        return [self._output(prompt["prompt_token_ids"], params) for prompt, params in pairs]

    def _output(self, ids: list[int], params: SamplingParams) -> Any:
        row = torch.tensor([ids])
        ends = set(params.stop_token_ids or ())
        usual = () if params.ignore_eos else self.whole.stop_ids
        sampling = OurSampling(
            max_new_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed or 0,
            stop=tuple(params.stop or ()),
            stop_token_ids=(*ends, *usual),
        )
        found = next(self.whole.answer([Request("", {"input_ids": row}, sampling)]))
        by_token = isinstance(found.stopped_by, int)
        token_ids = [*found.token_ids, *([found.stopped_by] if by_token else [])]
        is_usual = by_token and found.stopped_by not in ends
        completion = types.SimpleNamespace(
            text=found.text,
            token_ids=token_ids,
            finish_reason=found.reason,
            stop_reason=None if is_usual else found.stopped_by,
            logprobs=self._places(ids, token_ids, params.logprobs),
        )
        before = None if params.prompt_logprobs is None else [None]
        if before is not None:
            before += self._places(ids[:1], ids[1:], params.prompt_logprobs)
        return types.SimpleNamespace(
            prompt_token_ids=ids, outputs=[completion], prompt_logprobs=before
        )

    @torch.no_grad()
    def _places(self, first: list[int], then: list[int], count: int | None) -> list[Any] | None:
        """For each of the later tokens what vLLM says of its place."""
        if count is None:
            return None
        logits = self.whole.model(input_ids=torch.tensor([first + then])).logits[0]
        places = []
        for token_id, row in zip(then, logits[len(first) - 1 : -1].log_softmax(-1), strict=True):
            order = row.argsort(descending=True).tolist()
            chosen = {*order[:count], token_id}
            places.append({one: Logprob(float(row[one]), order.index(one) + 1) for one in chosen})
        return places


def make_module() -> types.ModuleType:
    """Return the module to put at `sys.modules["vllm"]`."""
    module = types.ModuleType("vllm")
    LLM.calls.clear()
    for one in (LLM, SamplingParams, TokensPrompt):
        setattr(module, one.__name__, one)
    return module
