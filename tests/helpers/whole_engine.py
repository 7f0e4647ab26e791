"""Answers and scores as the decoding engine does, one prompt at a time, with a whole model.

Slow and plain: transformers' own forward and `generate`. Tests compare with it, or use it where
they do not test the engine.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from stageline.data.text.processor import get_pad_token_id, get_tokenizer
from stageline.inference.decoding.request import Finished, Request, Scored, ScoreRequest
from stageline.inference.generation import stop_token_ids


class WholeEngine:
    """`answer` and `score` of `DecodingEngine`."""

    def __init__(self, model: torch.nn.Module, processor: Any) -> None:
        self.model, self.processor = model.eval(), processor
        self.tokenizer = get_tokenizer(processor)
        self.max_length = model.config.get_text_config().max_position_embeddings
        self.stop_ids = tuple(stop_token_ids(model, self.tokenizer))
        self.requests: list[Request] = []
        self.rows: list[ScoreRequest] = []

    def answer(self, requests: Iterable[Request]) -> Iterator[Finished]:
        """Last come, first served, since an engine may finish in any order."""
        for request in reversed(list(requests)):
            self.requests.append(request)
            yield self._answer(request)

    @torch.no_grad()
    def _answer(self, request: Request) -> Finished:
        sampling, num_prompt = request.sampling, request.prompt["input_ids"].shape[1]
        torch.manual_seed(sampling.seed)
        is_sampling = sampling.temperature > 0
        options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        stops = sampling.stop_token_ids
        stops = self.stop_ids if stops is None else stops
        row = self.model.generate(
            **request.prompt,
            max_new_tokens=sampling.max_new_tokens,
            do_sample=is_sampling,
            pad_token_id=get_pad_token_id(self.processor),
            eos_token_id=list(stops) or None,
            repetition_penalty=sampling.repetition_penalty,
            **(options if is_sampling else {}),
        )[0, num_prompt:].tolist()
        ends = [place for place, token_id in enumerate(row) if token_id in stops]
        kept = row[: ends[0]] if ends else row
        kept, text, stopped_by = self._cut(kept, sampling.stop)
        if stopped_by is None and ends:
            stopped_by = row[ends[0]]
        return Finished(
            request.key,
            "length" if stopped_by is None else "stop",
            prompt_tokens=num_prompt,
            completion_tokens=len(kept) + isinstance(stopped_by, int),
            text=text,
            token_ids=tuple(kept),
            stopped_by=stopped_by,
        )

    def _cut(self, ids: list[int], stop: Sequence[str]) -> tuple[list[int], str, str | None]:
        """Tokens up to the one that makes a stop text whole, the text before it, and itself."""
        text = ""
        for end in range(1, len(ids) + 1):
            text = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
            found = [(text.index(word), word) for word in stop if word in text]
            if found:
                return ids[:end], text[: min(found)[0]], min(found)[1]
        return ids, text, None

    @torch.no_grad()
    def score(self, items: Iterable[ScoreRequest]) -> Iterator[Scored]:
        """Last come, first served."""
        for item in reversed(list(items)):
            self.rows.append(item)
            ids_T = item.prompt["input_ids"][0]
            logits = self.model(input_ids=ids_T[None, :-1]).logits[0, -item.num_targets :]
            targets = ids_T[-item.num_targets :]
            logprobs = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
            is_greedy = bool((logits.argmax(-1) == targets).all())
            yield Scored(item.key, tuple(logprobs.tolist()), is_greedy)
