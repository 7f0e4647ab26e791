"""Files of requests for offline batch APIs, and the files of answers that come back.

One JSON object a line: {"custom_id", "method", "url", "body"}; the answer to it has the same
custom_id. The id is a hash of the request, so no answer is taken for another question's.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stageline.errors import DataError, UserError
from stageline.inference.remote_messages import body_key

URL = "/v1/chat/completions"
MAX_REQUESTS = 50_000  # of one file; what the maker of the format takes
MAX_BYTES = 190 * 2**20  # it takes 200 MB


class RequestFiles:
    """Appends requests to requests-00001.jsonl and further files; each request once.

    Args:
        folder: where they lie; requests of an earlier, stopped run are kept.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.written: set[str] = set()
        for path in self.paths():
            whole = _whole_lines(path)
            self.written |= {json.loads(line)["custom_id"] for line in whole}

    def paths(self) -> list[Path]:
        """The files in order."""
        return sorted(self.folder.glob("requests-*.jsonl"))

    def add(self, bodies: list[dict[str, Any]]) -> None:
        """Writes those that are not there yet."""
        for body in bodies:
            key = body_key(body)
            if key in self.written:
                continue
            request = {"custom_id": key, "method": "POST", "url": URL, "body": body}
            line = json.dumps(request, ensure_ascii=False) + "\n"
            with self._path_for(len(line.encode())).open("a", encoding="utf-8") as file:
                file.write(line)
            self.written.add(key)

    def _path_for(self, num_bytes: int) -> Path:
        paths = self.paths()
        if not paths:
            return self._path(1)
        last = paths[-1]
        with last.open("rb") as file:
            num_lines = sum(1 for _ in file)
        is_full = num_lines >= self.max_requests or last.stat().st_size + num_bytes > self.max_bytes
        return self._path(len(paths) + 1) if is_full else last

    def _path(self, number: int) -> Path:
        return self.folder / f"requests-{number:05d}.jsonl"


def _whole_lines(path: Path) -> list[str]:
    """Its lines, after a torn last one was cut off."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return whole.decode("utf-8").splitlines()


def read_answers(path: str | Path) -> dict[str, dict[str, Any]]:
    """custom_id -> answer of one file of results, or of all `*.jsonl` in a folder.

    An answer has text, finish_reason and usage, or `error` where the request failed.

    Raises:
        UserError: there is no such file.
        DataError: a line is no answer; names file and line.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise UserError(
            f"there are no answers at {path}. The .jsonl file that the batch API gave back was "
            "expected, or a folder with such files: download it and give its path."
        )
    return {key: answer for file in files for key, answer in _read(file)}


def _read(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield row["custom_id"], _answer(row)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise DataError(
                f"{file}:{number}: this is no answer of a batch API ({type(error).__name__}: "
                f"{error}). An object with custom_id and response.body.choices was expected: give "
                "the file as it was downloaded."
            ) from error


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    response = row.get("response") or {}
    failed = row.get("error") or response.get("status_code", 200) >= 400
    if failed:
        return {"error": json.dumps(row.get("error") or response.get("body"))[:500]}
    body = response["body"]
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    return {
        "text": choice["message"].get("content") or "",
        "finish_reason": choice.get("finish_reason"),
        "usage": {
            name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")
        },
        "answered_by": body.get("model"),
    }
