"""What a person and a model have said so far. Who answers is a subclass's business."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from stageline.data.images import decode_image
from stageline.errors import DataError, StorageError, UserError
from stageline.inference.streaming import Write

Message = dict[str, Any]


class Dialogue:
    """Messages so far, and what is set for the next answer.

    Args:
        answering: options of the answers; may be changed between two of them.

    Attributes:
        system: what the model is told before all messages.
        messages: questions and answers in turn, as rows of data have them.
        pictures: files that go with the next question.
    """

    def __init__(self, **answering: Any) -> None:
        self.answering = answering
        self.system: str | None = None
        self.messages: list[Message] = []
        self.pictures: list[str] = []

    @property
    def takes_images(self) -> bool:
        """Whether the model can look at pictures."""
        return False

    def answer(self, text: str, *, write: Write) -> tuple[str, int]:
        """Asks with the pictures that wait, and keeps question and answer.

        Args:
            write: gets the answer piece by piece.

        Returns:
            The answer, and how many of the oldest messages had to be forgotten for it.
        """
        raise NotImplementedError

    def start_anew(self) -> None:
        """Forgets all messages but the system's."""
        self.messages, self.pictures = [], []

    def attach(self, path: str) -> None:
        """Lays a picture beside the next question.

        Raises:
            UserError: there is no such file, it is no picture, or the model takes none.
        """
        if not self.takes_images:
            raise UserError(
                "a picture came, and this model takes text alone. One that looks at pictures was "
                "expected: start the chat with a vision-language model."
            )
        file = Path(path).expanduser().absolute()
        open_picture(str(file))
        self.pictures.append(str(file))

    def undo(self) -> Message | None:
        """Forgets the last question with its answer, and returns the question."""
        if not self.messages:
            return None
        question = self.messages[-2]
        self.messages = self.messages[:-2]
        return question

    def retry(self, *, write: Write) -> tuple[str, int] | None:
        """Asks the last question again in place of its answer; None where there is none."""
        before = list(self.messages)
        question = self.undo()
        if question is None:
            return None
        shortened = list(self.messages)
        waiting, self.pictures = self.pictures, pictures_of(question)
        try:
            return self.answer(text_of(question), write=write)
        finally:
            self.pictures = waiting
            if self.messages == shortened:  # it failed, or was stopped before the first word
                self.messages = before

    def question(self, text: str) -> Message:
        """A message of the user with the pictures that wait."""
        if not self.pictures:
            return {"role": "user", "content": text}
        places = [{"type": "image", "image": path} for path in self.pictures]
        return {"role": "user", "content": [*places, {"type": "text", "text": text}]}

    def all_messages(self) -> list[Message]:
        """With the system's in front."""
        return self.with_system(self.messages)

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Some messages behind the system's."""
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def save(self, path: str) -> None:
        """Adds the conversation to a file as one row, in the form that training reads.

        Raises:
            StorageError: it can't be written.
        """
        file = Path(path).expanduser()
        # the weight says that an answer is not learnt: here it is what was said, to be used freely
        messages = [
            {name: value for name, value in message.items() if name != "weight"}
            for message in self.all_messages()
        ]
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise StorageError(
                f"{file} can't be written ({error.strerror}). A file in a folder that exists was "
                "expected: give another path; the conversation goes on."
            ) from error


def text_of(message: Message) -> str:
    """What was written in a message."""
    content = message["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def pictures_of(message: Message) -> list[str]:
    """The files that came with a message."""
    content = message["content"]
    return [] if isinstance(content, str) else [part["image"] for part in content[:-1]]


def open_picture(path: str) -> Image.Image:
    """A picture that decodes.

    Raises:
        UserError: it does not.
    """
    try:
        with Image.open(path) as image:
            decode_image(image, name=path)
        return Image.open(path)
    except (OSError, DataError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} can't be read as a picture ({error}). A file such as PNG, JPEG or WebP was "
            "expected: look at the path; it is relative to the folder you are in."
        ) from error
