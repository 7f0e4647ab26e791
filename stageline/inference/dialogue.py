"""A conversation in the terminal: what was said so far, commands, answers as they are made.

Who answers: a model in this process, or one behind a server (`serving/client.py`).
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from stageline.data.batches.batch import render_sample
from stageline.data.images.images import decode_image
from stageline.data.text.processor import get_image_token, get_tokenizer
from stageline.data.text.rendered import Rendered
from stageline.errors import DataError, RemoteError, StorageError, UserError
from stageline.inference.decoding.answer import AnswerText
from stageline.inference.generation import (
    encode_prompts,
    generate_batch,
    num_positions,
    stop_token_ids,
)

FENCE = "```"
COMMANDS = ("new", "system", "image", "retry", "undo", "save", "settings", "help")
HELP = "/help lists the commands, /exit ends; a line that ends with \\ goes on, so does a ``` block"

Message = dict[str, Any]
Settings = dict[str, Any]
Write = Callable[[str], object]
Answer = tuple[str, int]  # and how many of the oldest messages had to be forgotten for it


class Dialogue:
    """Messages so far; each of `COMMANDS` is a method, whose docstring is its help.

    Args:
        engine: who answers, a `LocalModel` or a server: `takes_images` says whether pictures,
            `fit` makes a prompt of the messages that there is room for, `stream` answers it piece
            by piece.
        write: gets each piece.
        change: (settings, name, text) -> settings with one of them changed; a ValueError says
            what is wrong with it.
        answering: how answers are made.

    Attributes:
        told: the message of the system, if there is one.
        messages: questions and answers in turn, as rows of data have them.
        pictures: files that go with the next question.
    """

    def __init__(
        self,
        engine: Any,
        *,
        write: Write,
        change: Callable[[Settings, str, str], Settings],
        **answering: Any,
    ) -> None:
        self.engine = engine
        self.write = write
        self.change = change
        self.answering = answering
        self.told: list[Message] = []
        self.messages: list[Message] = []
        self.pictures: list[str] = []

    def respond(self, text: str) -> bool:
        """Carries out a command, or writes the model's answer; False when it is the last."""
        word, _, rest = text.partition(" ")
        if word == "/exit":
            return False
        try:
            if word[:1] == "/" and word[1:] in COMMANDS:
                made = getattr(self, word[1:])(rest.strip())
            elif word[:1] == "/" and word[1:].isalpha():
                made = None
                note(f"no command {word}. {HELP}")
            else:
                made = self.answer(text)
            if made is not None:
                print(flush=True)
                if made[1]:
                    note(f"forgot the {made[1]} oldest messages: no room")
        except (UserError, RemoteError, StorageError) as error:  # the next message may be right
            print(f"error[{error.kind}]: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # outside an answer, which knows what to keep
            note("stopped")
        return True

    def answer(self, text: str) -> Answer:
        """Ask with the waiting pictures; keep question and answer, even if Ctrl-C stopped it.

        After an error the conversation is as it was before.
        """
        places = [{"type": "image", "image": path} for path in self.pictures]
        content = [*places, {"type": "text", "text": text}] if places else text
        question = {"role": "user", "content": content}
        prompt, num_dropped = self.engine.fit(self.told, [*self.messages, question], self.answering)
        pieces: list[str] = []

        def keep(piece: str) -> None:
            pieces.append(piece)  # first: Ctrl-C may come while it is written
            self.write(piece)

        try:
            self.engine.stream(prompt, keep, self.answering)
        except KeyboardInterrupt:
            if not pieces:
                return "", 0
        reply = {"role": "assistant", "content": "".join(pieces)}
        self.messages = [*self.messages[num_dropped:], question, reply]
        self.pictures = []
        return reply["content"], num_dropped

    def new(self, _: str = "") -> None:
        """forget the conversation"""
        self.messages, self.pictures = [], []
        note("a new conversation")

    def system(self, text: str) -> None:
        """TEXT: the system message; a new conversation"""
        self.told = [{"role": "system", "content": text}] if text else []
        self.new()

    def image(self, path: str) -> None:
        """PATH: a picture for the next message"""
        if not self.engine.takes_images:
            raise UserError("This model takes only text. Chat with a vision-language model.")
        file = str(_file(path).absolute())
        open_picture(file)
        self.pictures.append(file)
        note(f"{len(self.pictures)} for the next message")

    def retry(self, _: str = "") -> Answer | None:
        """answer the last message again"""
        before, waiting = self.messages, self.pictures
        if not before:
            note("nothing was asked yet")
            return None
        question = before[-2]
        self.messages, self.pictures = before[:-2], pictures_of(question)
        try:
            return self.answer(text_of(question))
        finally:
            self.pictures = waiting
            if self.messages == before[:-2]:  # it failed, or was stopped before the first word
                self.messages = before

    def undo(self, _: str = "") -> None:
        """forget the last message and its answer"""
        if not self.messages:
            return note("nothing was asked yet")
        note(f"forgot: {text_of(self.messages[-2])[:60]}")
        self.messages = self.messages[:-2]

    def save(self, path: str) -> None:
        """FILE: add the conversation to a file, a JSON line"""
        if not path:
            return note("/save FILE: where to?")
        row = {"messages": [*self.told, *self.messages]}  # the form that training reads
        file = _file(path)
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise StorageError(
                f"{file} can't be written ({error.strerror}). Give a path in a folder that exists; "
                "the conversation continues."
            ) from error
        note(f"added to {path}")

    def settings(self, text: str) -> None:
        """[NAME VALUE]: show or change how answers are made"""
        name, _, value = text.partition(" ")
        try:
            if value:
                self.answering = self.change(self.answering, name, value.strip())
        except ValueError as error:
            return note(str(error))
        for key, one in self.answering.items():
            note(f"{key} {one}")

    def help(self, _: str) -> None:
        """this list"""
        for name in COMMANDS:
            note(f"/{name} {getattr(self, name).__doc__}")
        note("/exit end")


def note(text: str) -> None:
    """Print a remark to stderr, in parentheses: it is not part of an answer."""
    print(f"({text})", file=sys.stderr)


def read_message(read: Callable[[str], str], *, prompt: str = "") -> str:
    """One message: a line, and further ones after a backslash or in a block of ```.

    Args:
        read: as `input`.

    Raises:
        EOFError: there is none.
    """
    lines = [read(prompt)]
    while True:
        is_in_block = sum(line.lstrip().startswith(FENCE) for line in lines) % 2 == 1
        if not is_in_block:
            if not lines[-1].endswith("\\"):
                break
            lines[-1] = lines[-1][:-1]
        try:
            lines.append(read(". " if prompt else ""))
        except EOFError:
            break
    return "\n".join(lines).strip()


def text_of(message: Message) -> str:
    """Return the text of a message, without its pictures."""
    content = message["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def pictures_of(message: Message) -> list[str]:
    """The files that came with a message."""
    content = message["content"]
    return [] if isinstance(content, str) else [part["image"] for part in content[:-1]]


def open_picture(path: str) -> Image.Image:
    """A picture that decodes, or a UserError."""
    try:
        with Image.open(path) as image:
            decode_image(image, name=path)
        return Image.open(path)
    except (OSError, DataError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} can't be read as a picture ({error}). Give a PNG, JPEG or WebP file; the path "
            "is relative to the folder you are in."
        ) from error


def _file(path: str) -> Path:
    """A path as a shell writes it, or as it is."""
    try:
        words = shlex.split(path)
    except ValueError:
        words = []
    return Path(words[0] if len(words) == 1 else path).expanduser()


@dataclasses.dataclass(eq=False)
class LocalModel:
    """A model in this process; it answers as evaluate.py's does.

    Args:
        render: a prompt_fn part, (sample, prompt, processor=, for_generation=) -> Rendered: it
            keeps what users write apart from the template's own tokens.
        image_token: an image_token part, (rendered, images, processor=) -> Rendered; without it
            no pictures are taken.
    """

    model: PreTrainedModel
    processor: Any
    _: dataclasses.KW_ONLY
    render: Callable[..., Rendered]
    image_token: Callable[..., Rendered] | None = None
    num_asked: int = dataclasses.field(default=0, init=False)

    @property
    def takes_images(self) -> bool:
        """Whether the model can look at pictures."""
        return self.image_token is not None and get_image_token(self.processor) is not None

    def fit(
        self, told: list[Message], messages: list[Message], answering: Settings
    ) -> tuple[dict[str, torch.Tensor], int]:
        """The prompt of as many of the newest messages as the model has positions for."""
        most = num_positions(self.model)
        for num_dropped in range(0, len(messages), 2):  # a question with its answer
            batch = self.encode([*told, *messages[num_dropped:]])
            length = batch["input_ids"].shape[1]
            if most is None or length + answering["max_new_tokens"] <= most:
                return batch, num_dropped
        raise UserError(
            f"The message is {length} tokens long; with `max_new_tokens` "
            f"{answering['max_new_tokens']} the model reads {most}. Shorten it, or lower that."
        )

    def encode(self, messages: list[Message]) -> dict[str, torch.Tensor]:
        """Token ids of the prompt that some messages make."""
        images = [open_picture(path) for message in messages for path in pictures_of(message)]
        # weight 0 keeps old answers out of the loss, so a template may leave them out
        unlearnt = [
            {**message, "weight": 0} if message["role"] == "assistant" else message
            for message in messages
        ]
        rendered = render_sample(
            images or None,
            {"id": "chat", "messages": unlearnt},
            prompt="[QUESTION][ANSWER]",  # a prompt_fn takes a template; messages do without
            prompt_fn=self.render,
            image_token=self.image_token or (lambda rendered, images, *, processor: rendered),
            processor=self.processor,
            for_generation=True,
        )
        rendered = dataclasses.replace(rendered, name="the conversation")
        return encode_prompts([rendered], [images or None], processor=self.processor)

    @torch.no_grad()
    def stream(self, prompt: dict[str, torch.Tensor], write: Write, answering: Settings) -> None:
        """Answer a prompt; after Ctrl-C write what was held back."""
        options: dict[str, Any] = {"do_sample": answering["temperature"] > 0}
        names = ["max_new_tokens", "repetition_penalty"]
        if options["do_sample"]:
            self.num_asked += 1
            torch.manual_seed(answering["seed"] + self.num_asked)  # another one when asked again
            names = [name for name in answering if name != "seed"]
        options |= {name: answering[name] for name in names}
        stop_ids = stop_token_ids(self.model, self.processor)
        streamer = _Streamer(AnswerText(get_tokenizer(self.processor), (), stop_ids), write)
        try:
            generate_batch(self.model, self.processor, prompt, streamer=streamer, **options)
        except KeyboardInterrupt:
            streamer.end()
            raise


class _Streamer(BaseStreamer):
    """Takes transformers' tokens as they come, the prompt first, and writes the text they add."""

    def __init__(self, text: AnswerText, write: Write) -> None:
        self.text, self.write, self.has_prompt = text, write, False

    def put(self, value: torch.Tensor) -> None:
        if self.has_prompt and (piece := self.text.add(int(value))):
            self.write(piece)
        self.has_prompt = True

    def end(self) -> None:
        if piece := self.text.finish():
            self.write(piece)
