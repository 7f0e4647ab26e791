"""From the messages or texts of a request to what the engine takes. Runs in threads of its own.

What users write stays plain text: their special tokens become none. Roles are a closed list, and
the template is the model's.
"""

import base64
import binascii
import contextlib
import functools
import http.client
import inspect
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from stageline.data.batches.batch import add_image_inputs, render_sample
from stageline.data.images.image_files import FORMATS, check_shape, open_picture
from stageline.data.images.images import ImageExpander, decode_image
from stageline.data.text.chat_template import ChatTemplate, strings_in
from stageline.data.text.processor import get_image_token, get_tokenizer, num_token_ids
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError
from stageline.inference.generation import encode_prompts
from stageline.serving.errors import ApiError, bad_request
from stageline.serving.tool_calls import ToolFormat, find_format

SECONDS = 15.0
MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
# IPv4 inside IPv6: of old, and of a translator of one's own
_INNER = tuple(map(ipaddress.ip_network, ("::/96", "64:ff9b:1::/48")))
_REDIRECTS = (301, 302, 303, 307, 308)


class FetchError(Exception):
    """Why a picture was not fetched, for the client."""


def fetch(url: str, *, max_bytes: int, seconds: float = SECONDS) -> bytes:
    """The picture at an http(s) address; public addresses only, with limits.

    The name is resolved once, each of its addresses is judged, and the connection goes to the
    address that was judged: a name that resolves otherwise the second time leads nowhere else. Each
    redirect is judged the same way. Proxies of the environment are not used. Not done by httpx: it
    judges no address, reads the bodies of redirects without a limit and limits the time of single
    reads only, so that most of this would stay.

    Args:
        max_bytes: nothing larger is read.
        seconds: for all of it, redirects included.

    Raises:
        FetchError: it can't be had, or must not.
    """
    until = time.monotonic() + seconds
    for _ in range(MAX_REDIRECTS + 1):
        parts = _parts_of(url)
        connection = _connect(parts, until)
        # the socket's own limit is one for each read: a server that drips would have no end
        watch = threading.Timer(_left(until), _hang_up, [connection.sock])
        watch.start()
        try:
            found = _get(connection, parts, max_bytes)
        except (OSError, http.client.HTTPException, ValueError) as error:
            _left(until)
            raise FetchError(f"the connection failed ({type(error).__name__})") from None
        finally:
            watch.cancel()
            connection.close()
        _left(until)  # what was hung up on may look whole
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise FetchError(f"it was redirected more than {MAX_REDIRECTS} times")


def _parts_of(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise FetchError("its address can't be read") from None
    if parts.scheme not in _PORTS or not parts.hostname or not url.isascii():
        raise FetchError("an http(s) address with a host, in ASCII, was expected")
    if parts.username is not None or parts.password is not None:
        raise FetchError("addresses with a user name are not taken")
    if port not in (None, *_PORTS.values()):
        raise FetchError("ports other than 80 and 443 are not asked")
    if any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise FetchError("its address has spaces or control characters")
    return parts


def _connect(parts: SplitResult, until: float) -> http.client.HTTPConnection:
    port = parts.port or _PORTS[parts.scheme]
    address = _judged_address(parts.hostname or "", port)
    left = _left(until)
    try:
        raw = socket.create_connection((address, port), timeout=left)
        raw.settimeout(_left(until))
        if parts.scheme == "https":
            context = ssl.create_default_context()
            raw = context.wrap_socket(raw, server_hostname=parts.hostname)
    except (OSError, ValueError) as error:
        raise FetchError(f"the connection failed ({type(error).__name__})") from None
    connection = http.client.HTTPConnection(parts.hostname or "", port, timeout=left)
    connection.sock = raw
    return connection


def _judged_address(host: str, port: int) -> str:
    """An address of the host; none of them may be of this machine or a private network."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise FetchError("its host is not known") from None
    addresses = [str(item[4][0]) for item in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise FetchError("its host is not a public one")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, also one inside another."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inside = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in ipaddress.ip_network("64:ff9b::/96"):
            inside.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(one is not None and not one.is_global for one in inside):
            return False
        if any(ip in network for network in _INNER):
            return False
        if ip.ipv4_mapped is not None:
            return True
    return ip.is_global and not ip.is_multicast


def _get(connection: http.client.HTTPConnection, parts: SplitResult, max_bytes: int) -> bytes | str:
    """The content, or where it is instead."""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
    response = connection.getresponse()
    if response.status in _REDIRECTS:
        place = response.getheader("Location")
        if not place:
            raise FetchError("it was redirected to nowhere")
        return place
    if response.status != 200:
        raise FetchError(f"its server answered {response.status}")
    if not (response.getheader("Content-Type") or "image/").lower().startswith("image/"):
        raise FetchError("its server says that it is no image")
    content = response.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise FetchError(f"it has more than {max_bytes} bytes")
    return content


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS, which may be waiting


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise FetchError("it took too long")
    return left


_SHOWN = 40


def read_pictures(
    urls: Sequence[str],
    *,
    max_images: int,
    max_pixels: int,
    max_bytes: int,
    may_fetch: bool,
) -> list[Image.Image]:
    """Decoded RGB pictures: data URLs are decoded, addresses are fetched where that is allowed.

    A user's text never names a file of this machine.

    Args:
        max_images: of the request.
        max_pixels: of each, width x height; known from its header before it is decoded.
        max_bytes: of each that is fetched.

    Raises:
        ApiError: one can't be had; the message counts from 0.
    """
    if len(urls) > max_images:
        raise bad_request(
            f"{len(urls)} images came; at most {max_images} are taken in one request.",
            param="messages",
            code="too_many_images",
        )
    pictures = []
    for number, url in enumerate(urls):
        name = f"image {number}"
        content = _content(url, name, may_fetch=may_fetch, max_bytes=max_bytes)
        pictures.append(_decoded(content, name, max_pixels))
    return pictures


def _content(url: str, name: str, *, may_fetch: bool, max_bytes: int) -> bytes:
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return _of_data_url(url, name)
    if not scheme.startswith(("http://", "https://")):
        raise _bad(
            f"{name} has the url {url[:_SHOWN]!r}. One that begins with data:image/ was expected, "
            "as files are not read."
        )
    if not may_fetch:
        raise _bad(
            f"{name} is an http(s) address, and this server fetches none. Send the picture itself "
            "as data:image/png;base64,... ."
        )
    try:
        return fetch(url, max_bytes=max_bytes)
    except FetchError as error:
        raise _bad(f"{name} was not fetched: {error}.") from None


def _of_data_url(url: str, name: str) -> bytes:
    head, comma, text = url.partition(",")
    kind = head[5:].lower()
    if not comma or not kind.startswith("image/") or not kind.endswith(";base64"):
        raise _bad(
            f"{name} has a data URL that begins with {head[:_SHOWN]!r}. data:image/png;base64,... "
            "was expected."
        )
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise _bad(f"{name} is no base64.") from None


def _decoded(content: bytes, name: str, max_pixels: int) -> Image.Image:
    try:
        picture = open_picture(BytesIO(content))
    except Exception:  # Pillow's readers raise anything
        raise _bad(
            f"{name} of {len(content)} bytes is no picture. One of {', '.join(FORMATS)} was "
            "expected."
        ) from None
    try:
        check_shape(picture, name=name, max_pixels=max_pixels)
        return decode_image(picture, name=name, max_pixels=max_pixels)
    except DataError as error:
        text = str(error).partition(" (`max_image_pixels`)")[0].partition(". ")[0]
        raise _bad(f"{text.replace(' in memory', '')}.") from None
    finally:
        picture.close()


def _bad(message: str) -> ApiError:
    return bad_request(message, param="messages", code="invalid_image")


# a prompt_fn part takes a template as well; messages do without
_TEMPLATE = "[QUESTION][ANSWER]"
_ROLES = {"developer": "system"}

Prompt = Mapping[str, torch.Tensor]
RenderPart = Callable[..., Rendered]


class PromptMaker:
    """Makes prompts with one processor.

    Args:
        render: a prompt_fn part, (sample, prompt, processor=, for_generation=) -> Rendered.
        image_token: an image_token part, (rendered, images, processor=) -> Rendered.
        max_length: positions of the model; texts that can't fit are not even tokenized.
        pictures: limits of `read_pictures`.
    """

    def __init__(
        self,
        processor: Any,
        *,
        render: RenderPart,
        image_token: RenderPart,
        max_length: int | None = None,
        **pictures: Any,
    ) -> None:
        self.processor = processor
        self.tokenizer = get_tokenizer(processor)
        self.num_ids = num_token_ids(processor)
        self.max_length = max_length
        self.longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        self.render = render
        self.image_token = image_token
        self.pictures = pictures
        # layouts of a template are kept in a dictionary that is changed by each reader
        self._lock = threading.Lock()

    @property
    def takes_images(self) -> bool:
        """Whether the model has a token for pictures."""
        return get_image_token(self.processor) is not None

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None: in a way that no grammar is made for."""
        with self._lock:
            return find_format(self.processor)

    def warm_up(self) -> None:
        """Tries the chat template once: a wrong one shows here, and the first request is quick."""
        self.of_messages([{"role": "user", "content": "Hello"}], tools=[])

    def of_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        asked: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """The prompt of a chat.

        Args:
            messages: as OpenAI's API has them.
            tools: that are shown to the model.
            asked: fields of the request: where the answer begins, variables of the template.

        Raises:
            ApiError: the template can't write them, or a picture can't be had.
        """
        begins_answer = asked.get("add_generation_prompt", True)
        continues = check_continued(messages, asked)
        if messages[-1]["role"] == "assistant" and begins_answer and not continues:
            raise bad_request(
                "The last message is the assistant's. One of the user or of a tool was expected, "
                "because the answer is a new message. To go on with that message set "
                "continue_final_message.",
                param="messages",
            )
        options = self._variables(asked)
        if continues:
            options["continue_final_message"] = True  # the library's own way to end the text there
        render = self._render_with(options, asked)
        self._check_size(sum(map(_num_letters, messages)), "messages")
        images = self._read_pictures(messages)
        sample = {
            "id": "request",
            "messages": [_plain(message) for message in messages],
            "tools": [dict(tool) for tool in tools],
        }
        try:
            with self._lock:
                rendered = render_sample(
                    images,
                    sample,
                    prompt=_TEMPLATE,
                    prompt_fn=render,
                    image_token=self.image_token,
                    processor=self.processor,
                    for_generation=begins_answer and not continues,
                )
            rendered = replace(rendered, for_generation=True)
            return encode_prompts([rendered], [images], processor=self.processor)
        except UserError as error:
            raise self._refused(error) from None

    def _variables(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What a request sets in the chat template; what it reads and nobody else sets."""
        given = dict(asked.get(_KWARGS) or {})
        effort = asked.get("reasoning_effort")
        if effort is not None and given.setdefault("reasoning_effort", effort) != effort:
            raise _no_variable("reasoning_effort came twice. Give it once.", _KWARGS)
        if not given:
            return given
        template = ChatTemplate.of(self.processor)
        own = {*_OWN, *template.tokenizer.special_tokens_map}
        known = template.variables - own
        for name, value in given.items():
            param = name if effort is not None and name == "reasoning_effort" else _KWARGS
            written = json.dumps(value, ensure_ascii=False)
            if name in own:
                raise _no_variable(f"{name} is set by the server. Leave it out.", param)
            if name not in known:
                raise _no_variable(
                    f"The model's chat template does not read {name[:100]!r}, so it would change "
                    f"nothing. What it reads is: {', '.join(sorted(known)) or 'none'}. Leave the "
                    "others out.",
                    param,
                )
            if len(written) > _LONGEST_VALUE or any(map(template.is_risky, strings_in(value))):
                raise _no_variable(
                    f"{name} is {written[:100]}. At most {_LONGEST_VALUE} letters of JSON in ASCII "
                    "were expected, without letters that special tokens begin or end with, "
                    "because the template writes it beside its own tokens.",
                    param,
                )
        return given

    def _render_with(self, options: Mapping[str, Any], asked: Mapping[str, Any]) -> RenderPart:
        """The prompt_fn part with some variables of the template beside those of the options."""
        if not options:
            return self.render
        if "template_options" not in inspect.signature(self.render).parameters:
            raise _no_variable(
                f"This server uses no chat template, which reads {', '.join(options)}. Leave it "
                "out.",
                _KWARGS if asked.get(_KWARGS) else next(iter(options)),
            )
        bound = getattr(self.render, "keywords", {}).get("template_options") or {}
        return functools.partial(self.render, template_options={**bound, **options})

    def of_text(self, text: str, *, is_whole: bool = False) -> Prompt:
        """The prompt that is a text, unless it is whole with the tokenizer's first tokens."""
        self._check_size(len(text), "prompt")
        rendered = Rendered((Piece(text, is_user=True),), is_chat=is_whole, for_generation=True)
        try:
            prompt = encode_prompts([rendered], [None], processor=self.processor)
        except UserError as error:
            raise self._refused(error) from None
        if prompt["input_ids"].shape[1] == 0:
            raise bad_request("The prompt has no tokens; one was expected.", param="prompt")
        return prompt

    def of_ids(self, ids: Sequence[int]) -> Prompt:
        """The prompt of some token ids as they are."""
        if max(ids) >= self.num_ids:
            raise bad_request(
                f"The prompt has the token id {max(ids)}; the model has {self.num_ids}.",
                param="prompt",
            )
        image_token = get_image_token(self.processor)
        if image_token and self.tokenizer.convert_tokens_to_ids(image_token) in ids:
            raise bad_request("The prompt has the id of an image without one.", param="prompt")
        input_ids = torch.tensor([list(ids)], dtype=torch.long)
        batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        add_image_inputs(
            batch, [None], processor=self.processor, names=["the prompt"], with_pixels=True
        )
        return batch

    def _check_size(self, num_letters: int, param: str) -> None:
        """Refuses what is too long by its letters alone: tokenizing takes seconds for megabytes."""
        if self.max_length is None or num_letters <= self.max_length * self.longest_token:
            return
        raise bad_request(
            f"The prompt has {num_letters} letters. The model has {self.max_length} positions for "
            f"tokens, the longest of which has {self.longest_token}. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )

    def _read_pictures(self, messages: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
        urls = [
            part["image_url"]["url"]
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        if urls and ImageExpander.of(self.processor) is None:
            raise bad_request(
                "The model reads text alone: leave the images out.",
                param="messages",
                code="unsupported_parameter",
            )
        return read_pictures(urls, **self.pictures)

    def _refused(self, error: UserError) -> ApiError:
        """Without names of folders of this machine."""
        text = str(error)
        for name in {str(getattr(self.tokenizer, "name_or_path", "") or "")} - {""}:
            text = text.replace(repr(name), "the model").replace(name, "the model")
        if not isinstance(error, DataError):
            for end in (". A template that", ": use ", "Final message to continue"):
                text = text.partition(end)[0]
        return bad_request(f"The messages can't be given to the model: {text}", param="messages")


_KWARGS = "chat_template_kwargs"
_LONGEST_VALUE = 2000
# arguments of the library's own functions
_OWN = {"messages", *inspect.signature(render_jinja_template).parameters}
_OWN |= inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()


def check_continued(messages: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> bool:
    """Whether the answer goes on with the last message, or an ApiError."""
    if not asked.get("continue_final_message"):
        return False
    why = ""
    if asked.get("add_generation_prompt"):
        why = "add_generation_prompt, which begins a new one"
    elif messages[-1].get("tool_calls"):
        why = "a last message that has tool_calls, behind which no text can follow"
    elif asked.get("tool_choice", "auto") not in ("auto", "none"):
        why = "a tool_choice that makes the answer a call and nothing else"
    if why:
        raise bad_request(
            f"continue_final_message, which goes on with the last message, came with {why}. Leave "
            "one of them out.",
            param="continue_final_message",
        )
    return True


def _no_variable(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="unsupported_parameter")


def _num_letters(message: Mapping[str, Any]) -> int:
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as rows of data have it; of no use for the template is what a reader sets."""
    kept = {name: value for name, value in message.items() if value not in (None, [])}
    kept["role"] = _ROLES.get(message["role"], message["role"])
    kept.setdefault("content", "")
    if message["role"] == "assistant":
        kept["weight"] = 0  # nothing is learnt here
    return kept
