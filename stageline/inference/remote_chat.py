"""A conversation with a model behind an OpenAI-style server; answers come piece by piece."""

from typing import Any
from urllib.parse import urlsplit

from stageline.errors import RemoteError, UserError
from stageline.inference.dialogue import (
    Dialogue,
    Message,
    open_picture,
    pictures_of,
    text_of,
)
from stageline.inference.remote import Endpoint
from stageline.inference.remote_messages import image_url
from stageline.inference.streaming import Write

MOST_PIXELS_A_SIDE = 2048  # a photograph would fill the largest body that servers take


class RemoteChat(Dialogue):
    """Messages so far, and the server that answers the next one.

    Args:
        endpoint: where; an empty name takes the first model that the server names.
        answering: max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed; what has
            no effect is not sent, as servers may refuse what OpenAI's does not know.

    Raises:
        UserError: the package `openai` is missing, or a key where one is needed.
        RemoteError: no name was given and the server can't be asked for one.
    """

    def __init__(self, endpoint: Endpoint, **answering: Any) -> None:
        super().__init__(**answering)
        self.endpoint = endpoint
        self.client = endpoint.client()
        self.num_asked = 0
        self.card = self._find_model()

    @property
    def takes_images(self) -> bool:
        """What the server says; where it says nothing, a try shows."""
        told = (getattr(self.card, "model_extra", None) or {}).get("stageline")
        return told.get("takes_images", True) if isinstance(told, dict) else True

    def answer(self, text: str, *, write: Write) -> tuple[str, int]:
        """Asks, and keeps question and answer, also one that Ctrl-C stopped.

        Raises:
            RemoteError: the server refuses or fails; the conversation is as it was before.
        """
        question = self.question(text)
        pieces: list[str] = []
        try:
            self._stream([*self.messages, question], pieces, write)
        except KeyboardInterrupt:
            if not pieces:
                return "", 0
        answer = "".join(pieces)
        self.messages = [*self.messages, question, {"role": "assistant", "content": answer}]
        self.pictures = []
        return answer, 0

    def _stream(self, messages: list[Message], pieces: list[str], write: Write) -> None:
        import httpx
        import openai

        body = {
            "model": self.endpoint.name,
            "messages": [_sent(message) for message in self.with_system(messages)],
            **self._sampling(),
        }
        self.num_asked += 1
        try:
            # leaving the block closes the connection, and the server stops its work
            with self.client.chat.completions.create(**body, stream=True) as chunks:
                for chunk in chunks:
                    piece = chunk.choices[0].delta.content if chunk.choices else None
                    if piece:
                        pieces.append(piece)
                        write(piece)
        except (openai.OpenAIError, httpx.HTTPError) as error:
            raise self._failure(error) from error

    def _sampling(self) -> dict[str, Any]:
        """The fields of a request that say how to answer."""
        given = self.answering
        fields: dict[str, Any] = {
            "max_tokens": given["max_new_tokens"],
            "temperature": given["temperature"],
        }
        ours: dict[str, Any] = {}  # not in OpenAI's own API
        if given["temperature"] > 0:
            fields["seed"] = given["seed"] + self.num_asked  # another one when asked again
            fields |= {"top_p": given["top_p"]} if given["top_p"] < 1 else {}
            ours |= {"top_k": given["top_k"]} if given["top_k"] else {}
        if given["repetition_penalty"] != 1:
            ours["repetition_penalty"] = given["repetition_penalty"]
        return {**fields, "extra_body": ours} if ours else fields

    def _find_model(self) -> Any:
        import openai

        try:
            cards = list(self.client.models.list())
        except openai.OpenAIError as error:
            if self.endpoint.name:
                return None  # some servers answer without having a list
            raise self._failure(error) from error
        named = [card for card in cards if card.id == self.endpoint.name]
        if named or self.endpoint.name:
            return named[0] if named else None
        if not cards:
            raise RemoteError(
                f"{self.endpoint.base_url} names no model. One was expected, because a request "
                "says which is to answer: give its name with --server-model."
            )
        self.endpoint.name = cards[0].id
        return cards[0]

    def _failure(self, error: Exception) -> RemoteError:
        """The server's own words, and where they came from."""
        body = getattr(error, "body", None)
        told = body.get("message") if isinstance(body, dict) else None
        status = getattr(error, "status_code", None)
        what = f"{status}: {told or error}" if status else f"{type(error).__name__}: {error}"
        if not status and error.__cause__ is not None:  # such as a certificate's
            what += f" {error.__cause__}"
        advice = (
            f"a key that it knows was expected in the environment variable "
            f"{self.endpoint.api_key_env}"
            if status in (401, 403)
            else "its certificate was expected to be signed by an authority that is known here: "
            "name the file of your own (PEM) in the environment variable SSL_CERT_FILE"
            if "CERTIFICATE_VERIFY_FAILED" in what
            else "look at --server and --server-model, or at the server's log"
        )
        return RemoteError(
            f"{self.endpoint.base_url} does not answer ({what[:500]}). The message was not kept; "
            f"{advice}."
        )


def server_url(url: str) -> str:
    """The address of the API: `/v1` is added to a bare host.

    Raises:
        UserError: it is no http address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(
            f"--server {url!r} is no address. One such as http://127.0.0.1:8000 was expected, "
            "because the chat is with a server there: write it with http:// or https://."
        )
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


def _sent(message: Message) -> Message:
    """A message with its pictures inside, as servers take them."""
    paths = pictures_of(message)
    if not paths:
        return {"role": message["role"], "content": message["content"]}
    urls = [image_url(open_picture(path), name=path, max_side=MOST_PIXELS_A_SIDE) for path in paths]
    places = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "role": message["role"],
        "content": [*places, {"type": "text", "text": text_of(message)}],
    }
