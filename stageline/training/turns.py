"""Rollouts of several turns: the model's completions, and what an environment says to each.

An environment is an object of its own for each answer: `reset(sample)` returns the messages of the
prompt ([] = those of the row), `step(completion)` (messages, reward, done). Its messages become
tokens of the row that are read but not trained on; rewards are summed. Environments run on the host
of a pipeline's first rank, and must follow from sample and completions: then a resumed run draws
the same answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from torch.utils.data import Subset

from stageline.contracts import broken, shown
from stageline.data.batches.batch import Images, Sample
from stageline.data.batches.collate_part import EncodedSample
from stageline.data.batches.prompts import answered
from stageline.errors import UserError
from stageline.inference.decoding.answer_groups import SampledAnswer
from stageline.inference.decoding.request import Sampling
from stageline.seeds import derive_seed

Message = Mapping[str, Any]  # role and content
Draw = Callable[..., list[list[SampledAnswer]]]
MARK = "\ue00fanswer\ue00f"  # stands for a completion in a rendered conversation


class Environment(Protocol):
    """Contract of an environment component."""

    def reset(self, sample: Sample) -> Sequence[Message]:
        """Return the messages of the prompt; none: the row's own."""

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Return messages that follow a completion, its reward, and whether the episode ends."""


class OpenedRows(Subset):
    """A dataset whose samples have the messages that an environment begins with."""

    def __init__(self, dataset: Any, make: Callable[[], Environment]) -> None:
        super().__init__(dataset, range(len(dataset)))
        self.make = make

    def __getitem__(self, row: int) -> tuple[Images, Sample]:
        images, sample = self.dataset[row]
        messages = self.make().reset(sample)
        return images, {**sample, **({"messages": list(messages)} if messages else {})}

    def __getitems__(self, rows: list[int]) -> list[tuple[Images, Sample]]:  # torch requires it
        return [self[row] for row in rows]


@dataclass(frozen=True)
class MessageTokens:
    """Token ids of what follows a completion, up to where the next one begins.

    Args:
        render: messages -> text up to an answer, by the run's template; None: contents are joined.
        end_ids: tokens that end a turn, which a completion may have drawn itself.
    """

    tokenizer: Any
    render: Callable[[Sequence[Message]], str] | None
    end_ids: Sequence[int]

    def __call__(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Return the ids behind a completion that ended with token `last_id`."""
        if self.render is None:
            text = "".join(str(one["content"]) for one in messages)
        else:
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
            _, is_there, text = self.render([*turns, *messages]).partition(MARK)
            if not is_there:
                raise UserError(
                    "the chat template leaves out an answer before the messages of the "
                    "environment. Use another `prompt_fn.template`."
                )
            if last_id in self.end_ids:  # the template would write it again
                text = text.removeprefix(self.tokenizer.decode([last_id]))
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass(eq=False)
class _Episode:
    prompt: EncodedSample
    seed: int
    environment: Environment
    answer: SampledAnswer = field(default_factory=lambda: SampledAnswer(is_own=[]))
    is_over: bool = False

    def continued(self) -> EncodedSample:
        """Return the prompt of the next turn: all so far, with a stand-in for a completion."""
        ids = self.answer.token_ids
        return answered(self.prompt, [*ids, 0], [*[False] * len(ids), True])


@dataclass(eq=False)
class Episodes:
    """Draws answers of several turns; all ranks of a pipeline call it.

    Args:
        draw: draws completions, `StageAnswers`.
        shared: gives what the first rank has on all of them.
        max_turns: completions of an answer.
    """

    draw: Draw
    make: Callable[[], Environment]
    tokens_of: MessageTokens
    _: KW_ONLY
    shared: Callable[[Any], Any]
    max_turns: int

    def __call__(
        self,
        prompts: Sequence[EncodedSample],
        seeds: Sequence[tuple[int, ...]],
        sampling: Sampling,
        *,
        lot_size: int,
    ) -> list[list[SampledAnswer]]:
        """Return the answers to each prompt, on the first rank; elsewhere what `draw` returns.

        `sampling.max_new_tokens` limits a whole answer, with the environment's tokens in it.
        """
        copies = len(seeds[0])
        found = self.draw(prompts, seeds, sampling, lot_size=lot_size)
        episodes = []
        for prompt, group, own in zip(prompts, found, seeds, strict=False):
            for seed, completion in zip(own, group, strict=True):
                episodes.append(_Episode(prompt, seed, self.make()))
                episodes[-1].environment.reset(prompt.sample)
                self._step(episodes[-1], completion, sampling.max_new_tokens)
        for turn in range(1, self.max_turns):
            going = [one for one in episodes if not one.is_over]
            if not self.shared(bool(going)):
                break
            found = self.draw(
                [one.continued() for one in going],
                [(derive_seed(one.seed, "turn", turn),) for one in going],
                sampling,
                lot_size=lot_size * copies,
            )
            for one, [completion] in zip(going, found, strict=False):
                self._step(one, completion, sampling.max_new_tokens)
        answers = [one.answer for one in episodes]
        for answer in answers:  # context behind the last completion serves none
            while answer.is_own and not answer.is_own[-1]:
                del answer.token_ids[-1], answer.log_probs[-1], answer.is_own[-1]
        return [answers[p : p + copies] for p in range(0, len(answers), copies)]

    def _step(self, episode: _Episode, completion: SampledAnswer, most: int) -> None:
        """Add a completion, and the environment's messages."""
        answer, count = episode.answer, len(completion.token_ids)
        room = most - len(answer.token_ids)
        answer.token_ids += completion.token_ids[:room]
        answer.log_probs += completion.log_probs[:room]
        answer.is_own = [*(answer.is_own or ()), *[True] * min(count, room)]
        answer.text = completion.text
        answer.turns.append(completion.text)
        answer.is_cut = completion.is_cut or count > room
        made = episode.environment.step(completion.text)
        if not (isinstance(made, tuple) and len(made) == 3):
            raise broken(
                "environment",
                episode.environment,
                f"returned {shown(made)} of step",
                why="(messages, reward, done) is required",
                cure='return [{"role": "tool", "content": "5"}], 0.0, False',
            )
        messages, reward, is_done = made
        answer.reward += float(reward)
        episode.is_over = bool(is_done) or answer.is_cut
        if episode.is_over:
            return
        ids = self.tokens_of(messages, completion.token_ids[-1])
        answer.turns.append("".join(str(one["content"]) for one in messages))
        answer.token_ids += ids
        answer.log_probs += [0.0] * len(ids)
        answer.is_own = [*answer.is_own, *[False] * len(ids)]
        if len(answer.token_ids) >= most:
            answer.is_cut = episode.is_over = True
