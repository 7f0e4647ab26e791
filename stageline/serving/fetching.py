"""Fetches a picture from the web for somebody else: public addresses only, with limits.

The name is resolved once, each of its addresses is judged, and the connection goes to the address
that was judged: a name that resolves otherwise the second time leads nowhere else. Each redirect
is judged the same way. Proxies of the environment are not used.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from urllib.parse import SplitResult, urljoin, urlsplit

SECONDS = 15.0
MAX_REDIRECTS = 3
_CHUNK = 65536
_PORTS = {"http": 80, "https": 443}
# IPv4 inside IPv6: of old, and of a translator of one's own
_INNER = tuple(map(ipaddress.ip_network, ("::/96", "64:ff9b:1::/48")))
_REDIRECTS = (301, 302, 303, 307, 308)


class FetchError(Exception):
    """Why a picture was not fetched, for the client."""


def fetch(url: str, *, max_bytes: int, seconds: float = SECONDS) -> bytes:
    """What lies at an http(s) address.

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
        try:
            found = _get(connection, parts, max_bytes, until)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FetchError(f"the connection failed ({type(error).__name__})") from None
        finally:
            connection.close()
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


def _get(
    connection: http.client.HTTPConnection, parts: SplitResult, max_bytes: int, until: float
) -> bytes | str:
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
    return _read(connection, response, max_bytes, until)


def _read(
    connection: http.client.HTTPConnection,
    response: http.client.HTTPResponse,
    max_bytes: int,
    until: float,
) -> bytes:
    content = bytearray()
    while True:
        if connection.sock is not None:  # None: the server closes after this response
            connection.sock.settimeout(_left(until))
        chunk = response.read1(_CHUNK)
        if not chunk:
            return bytes(content)
        content += chunk
        if len(content) > max_bytes:
            raise FetchError(f"it has more than {max_bytes} bytes")
        _left(until)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise FetchError("it took too long")
    return left
