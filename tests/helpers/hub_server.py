"""A small hub on this machine that answers the requests of huggingface_hub.

It keeps models and data sets by commit, notes every request, and can cut a download, change a
file on its way, or keep a name from those without a token.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from stageline.hub import FETCHED

TOKEN = "hf_token_of_this_test"
_LARGE = (".safetensors", ".parquet", ".bin")
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+))?.*")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass(frozen=True)
class Request:
    """One request: its method, its path, and what it asks of a file."""

    method: str
    path: str
    bytes_from: int | None


@dataclass
class Repo:
    """The content of the hub under a name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    is_gated: bool = False


class Hub:
    """The hub of a test.

    Attributes:
        requests: all that came, in order.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.requests: list[Request] = []
        self.url = ""

    def add(
        self,
        name: str,
        content: Path | Mapping[str, bytes],
        *,
        branch: str = "main",
        kind: str = "models",
        **facts: bool,
    ) -> str:
        """Puts the files of a folder on a branch; returns the commit."""
        if isinstance(content, Path):
            files = [path for path in sorted(content.rglob("*")) if path.is_file()]
            content = {str(path.relative_to(content)): path.read_bytes() for path in files}
        commit = hashlib.sha1(repr((name, branch, sorted(content.items()))).encode()).hexdigest()
        repo = self.repos.setdefault((kind, name), Repo(**facts))
        repo.commits[commit] = dict(content)
        repo.branches[branch] = commit
        return commit

    def asked(self) -> list[str]:
        """Return the paths that were requested, except for huggingface_hub's count of its users."""
        return [one.path for one in self.requests if "agent" not in one.path]

    def downloads(self, pattern: str = ".*") -> list[str]:
        """Return names of the files that were downloaded, in order, each as often as it was."""
        found = [_FILE.fullmatch(one.path) for one in self.requests if one.method == "GET"]
        return [match[4] for match in found if match and re.fullmatch(pattern, match[4])]

    def answers_here(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        """Lets this process, and those it forks, find this hub, with a cache of its own."""
        from huggingface_hub import close_session, constants

        close_session()  # an open session would keep its old settings
        patch.setattr(constants, "ENDPOINT", self.url)
        template = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
            patch.setattr(constants, name, value)
        for name in (FETCHED, "HF_TOKEN", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serves until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _entry(path: str, content: bytes) -> dict[str, object]:
    size = len(content)
    entry: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": _blob(content)}
    if path.endswith(_LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 130}
    return entry


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", "0"))))

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self.hub.requests.append(Request(self.command, path, int(start[1]) if start else None))
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        match = api or file
        if match is None:
            self._refuse(404, "")
            return
        kind = api[1] if api else "datasets" if file[1] else "models"
        repo = self.hub.repos.get((kind, match[2]))
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.is_private and not has_token):
            self._refuse(404 if has_token else 401, "RepoNotFound")
            return
        revision = unquote((api[4] or "main") if api else file[3])
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            self._refuse(404, "RevisionNotFound")
            return
        files = repo.commits[commit]
        if api is None:
            if repo.is_gated and not has_token:
                self._refuse(403, "GatedRepo")
            elif file[4] not in files:
                self._refuse(404, "EntryNotFound", commit)
            else:
                self._send_file(file[4], files[file[4]], commit, int(start[1]) if start else 0)
        elif api[3] in ("tree", "paths-info"):
            wanted = set(files) if api[3] == "tree" else set(_paths(body))
            self._send_json([_entry(name, files[name]) for name in sorted(wanted & set(files))])
        else:
            siblings = [{"rfilename": name} for name in sorted(files)]
            facts = {"id": match[2], "sha": commit, "siblings": siblings, "gated": repo.is_gated}
            self._send_json({**facts, "private": repo.is_private, "tags": [], "downloads": 0})

    def _refuse(self, code: int, word: str, commit: str = "") -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", word)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_file(self, name: str, content: bytes, commit: str, start: int) -> None:
        sha256 = hashlib.sha256(content).hexdigest()
        is_large = name.endswith(_LARGE)
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{sha256 if is_large else _blob(content)}"')
        if is_large:
            self.send_header("X-Linked-Etag", f'"{sha256}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Accept-Ranges", "bytes")
        if start:
            last = len(content) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[start:])


def _paths(body: bytes) -> list[str]:
    try:
        found = json.loads(body)["paths"]
    except ValueError:  # the body is a form
        found = re.findall(r"paths=([^&]+)", body.decode())
    return [unquote(found)] if isinstance(found, str) else list(map(unquote, found))
