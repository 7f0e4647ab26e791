"""Pictures of a request: data URLs are decoded, addresses are fetched where that is allowed.

A user's text never names a file of this machine.
"""

import base64
import binascii
from collections.abc import Sequence
from io import BytesIO

from PIL import Image

from stageline.data.images import check_shape, decode_image
from stageline.data.picture_file import FORMATS, open_picture
from stageline.errors import DataError
from stageline.serving.errors import ApiError, bad_request
from stageline.serving.fetching import FetchError, fetch

_SHOWN = 40


def read_pictures(
    urls: Sequence[str],
    *,
    max_images: int,
    max_pixels: int,
    max_bytes: int,
    may_fetch: bool,
) -> list[Image.Image]:
    """Decoded RGB pictures.

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
        text = str(error).partition(" (--max-image-pixels)")[0].partition(". ")[0]
        raise _bad(f"{text.replace(' in memory', '')}.") from None
    finally:
        picture.close()


def _bad(message: str) -> ApiError:
    return bad_request(message, param="messages", code="invalid_image")
