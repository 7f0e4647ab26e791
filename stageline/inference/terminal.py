"""The terminal side of a chat: reads messages and commands, prints answers as they come."""

import functools
import shlex
import sys
from collections.abc import Callable
from typing import Any

from stageline.errors import DataError, RemoteError, StorageError, UserError
from stageline.inference.dialogue import Dialogue, text_of

FENCE = "```"
COMMANDS = {
    "/new": "forget the conversation",
    "/system": "TEXT: the system message; a new conversation",
    "/image": "PATH: a picture for the next message",
    "/retry": "answer the last message again",
    "/undo": "forget the last message and its answer",
    "/save": "FILE: add the conversation to a file, a JSON line",
    "/settings": "[NAME VALUE]: show or change how answers are made",
    "/help": "this list",
    "/exit": "end",
}
HELP = "/help lists the commands, /exit ends; a line that ends with \\ goes on, so does a ``` block"

Change = Callable[[dict[str, Any], str, str], dict[str, Any]]
_OURS = (UserError, DataError, RemoteError, StorageError)


class Terminal:
    """Carries out what a person types.

    Args:
        change: (settings, name, text) -> settings with one of them changed; a ValueError says
            what is wrong with it.
    """

    def __init__(self, chat: Dialogue, *, change: Change) -> None:
        self.chat = chat
        self.change = change

    def respond(self, text: str) -> bool:
        """Carries out a command, or prints the model's answer; False when it is the last."""
        word, _, rest = text.partition(" ")
        if word == "/exit":
            return False
        try:
            if word in COMMANDS:
                getattr(self, f"_{word[1:]}")(rest.strip())
            elif word.startswith("/") and word[1:].isalpha():
                note(f"no command {word}. {HELP}")
            else:
                self._print(functools.partial(self.chat.answer, text))
        except _OURS as error:  # the next message may be right
            print(f"error[{error.kind}]: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # outside an answer, which knows what to keep
            note("stopped")
        return True

    def _print(self, ask: Callable[..., tuple[str, int] | None]) -> None:
        """Prints an answer piece by piece."""
        made = ask(write=functools.partial(print, end="", flush=True))
        if made is None:
            note("nothing was asked yet")
            return
        print(flush=True)
        if made[1]:
            note(f"forgot the {made[1]} oldest messages: no room")

    def _new(self, _: str) -> None:
        self.chat.start_anew()
        note("a new conversation")

    def _system(self, text: str) -> None:
        self.chat.system = text or None
        self._new("")

    def _image(self, path: str) -> None:
        self.chat.attach(_unquoted(path))
        note(f"{len(self.chat.pictures)} for the next message")

    def _retry(self, _: str) -> None:
        self._print(self.chat.retry)

    def _undo(self, _: str) -> None:
        question = self.chat.undo()
        note("nothing was asked yet" if question is None else f"forgot: {text_of(question)[:60]}")

    def _save(self, path: str) -> None:
        if not path:
            note("/save FILE: where to?")
            return
        self.chat.save(_unquoted(path))
        note(f"added to {path}")

    def _settings(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if value:
            try:
                self.chat.answering = self.change(self.chat.answering, name, value.strip())
            except ValueError as error:
                note(str(error))
                return
        for key, one in self.chat.answering.items():
            note(f"{key} {one}")

    def _help(self, _: str) -> None:
        for command, what in COMMANDS.items():
            note(f"{command} {what}")


def note(text: str) -> None:
    """Says something that is no answer."""
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
        is_going_on = lines[-1].endswith("\\") and not is_in_block
        if not (is_in_block or is_going_on):
            break
        if is_going_on:
            lines[-1] = lines[-1][:-1]
        try:
            lines.append(read(". " if prompt else ""))
        except EOFError:
            break
    return "\n".join(lines).strip()


def _unquoted(path: str) -> str:
    """A path as a shell writes it, or as it is."""
    try:
        words = shlex.split(path)
    except ValueError:
        return path
    return words[0] if len(words) == 1 else path
