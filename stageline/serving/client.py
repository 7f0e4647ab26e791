"""A model behind an OpenAI-style server, as the one who answers in a `Dialogue`."""

from typing import Any
from urllib.parse import urlsplit

from stageline.errors import RemoteError, UserError
from stageline.inference.dialogue import Settings, Write, open_picture, pictures_of, text_of
from stageline.inference.remote import Endpoint, Message, image_url, send

MOST_PIXELS_A_SIDE = 2048  # a photograph would fill the largest body that servers take


class Server:
    """A model behind an OpenAI-style server; without a name the first that the server names.

    Raises:
        RemoteError: no name was given and the server can't be asked for one.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.client = endpoint.client()
        self.num_asked = 0
        self.card = self._find_model()

    @property
    def takes_images(self) -> bool:
        """Whether the server's model takes images; True if the server does not say."""
        told = (getattr(self.card, "model_extra", None) or {}).get("stageline")
        return told.get("takes_images", True) if isinstance(told, dict) else True

    def fit(
        self, told: list[Message], messages: list[Message], answering: Settings
    ) -> tuple[list[Message], int]:
        """Return all messages in the format of servers, which refuse what is too long."""
        return [_sent(message) for message in [*told, *messages]], 0

    def stream(self, prompt: list[Message], write: Write, answering: Settings) -> None:
        """Ask the server; a RemoteError says that it refuses or fails."""
        import httpx
        import openai

        self.num_asked += 1
        body = {"model": self.endpoint.name, "messages": prompt}
        body |= {"max_tokens": answering["max_new_tokens"], "temperature": answering["temperature"]}
        # omit settings without effect: servers may refuse fields that OpenAI's does not have
        if answering["temperature"] > 0:
            body["seed"] = answering["seed"] + self.num_asked  # another one when asked again
            body |= {"top_p": answering["top_p"]} if answering["top_p"] < 1 else {}
            body |= {"top_k": answering["top_k"]} if answering["top_k"] else {}
        if answering["repetition_penalty"] != 1:
            body["repetition_penalty"] = answering["repetition_penalty"]
        try:
            # leaving the block closes the connection, and the server stops its work
            with send(self.client, body, stream=True) as chunks:
                for chunk in chunks:
                    piece = chunk.choices[0].delta.content if chunk.choices else None
                    if piece:
                        write(piece)
        except (openai.OpenAIError, httpx.HTTPError) as error:
            raise self._failure(error) from error

    def _find_model(self) -> Any:
        import openai

        try:
            cards = list(self.client.models.list())
        except openai.OpenAIError as error:
            if self.endpoint.name:
                return None  # some servers answer without having a list
            raise self._failure(error) from error
        if self.endpoint.name:
            return next((card for card in cards if card.id == self.endpoint.name), None)
        if not cards:
            raise RemoteError(
                f"{self.endpoint.base_url} names no model. Give a model's name in `server_model`."
            )
        self.endpoint.name = cards[0].id
        return cards[0]

    def _failure(self, error: Exception) -> RemoteError:
        what = f"{type(error).__name__}: {error} {error.__cause__ or ''}".strip()
        advice = "Check `server` and `server_model`, or the server's log"
        if getattr(error, "status_code", None) in (401, 403):
            advice = f"Put a key that it accepts into the variable {self.endpoint.api_key_env}"
        elif "CERTIFICATE_VERIFY_FAILED" in what:
            advice = "Name your authority's file (PEM) in the environment variable SSL_CERT_FILE"
        return RemoteError(
            f"{self.endpoint.base_url} does not answer ({what[:500]}). The message was not kept. "
            f"{advice}."
        )


def server_url(url: str) -> str:
    """The address of the API: `/v1` is added to a bare host."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"`server` {url!r} is not an address. Write it as http://127.0.0.1:8000.")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


def _sent(message: Message) -> Message:
    """Return a message in the format of servers, which contains its pictures."""
    if not (paths := pictures_of(message)):
        return message
    urls = [image_url(open_picture(path), name=path, max_side=MOST_PIXELS_A_SIDE) for path in paths]
    places = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {**message, "content": [*places, {"type": "text", "text": text_of(message)}]}
