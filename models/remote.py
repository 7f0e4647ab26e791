"""Models behind an OpenAI-style endpoint: a builder and two model components.

`remote` sends many requests at once, paced, tried again and counted; `batch_file` writes them to
files for an offline batch API.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

from register import builder_register, model_register
from stageline.data.text.messages import Conversation
from stageline.data.text.rendered import Rendered
from stageline.errors import DataError, RemoteError, UserError
from stageline.inference.remote import Endpoint, messages_of, send
from stageline.run_records import cut_torn_line

# options that change no answer: predictions continue with other values of these
OF_THE_WAY = ("api_key_env", "timeout", "max_retries", "requests_per_minute")
USAGE = ("prompt_tokens", "completion_tokens")


@builder_register("remote", without_effect=(*OF_THE_WAY, "input_price", "output_price"))
def remote_endpoint(
    model_path: str | None = None,
    *,
    name: str,
    base_url: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    timeout: float = 120.0,
    max_retries: int = 5,
    requests_per_minute: float | None = None,
    input_price: float | None = None,
    output_price: float | None = None,
    **machine: object,
) -> tuple[Endpoint, None, dict[str, object]]:
    """A model elsewhere, for the model parts remote and batch_file; loads nothing.

    Args:
        name: the model's name at the endpoint.
        base_url: such as http://127.0.0.1:8000/v1; default: OpenAI's own.
        api_key_env: environment variable that holds the key.
        timeout: seconds for one attempt.
        max_retries: further attempts, with growing pauses or as the server says.
        requests_per_minute: pace of requests; default: as fast as answers come.
        input_price: of a million tokens in prompts, for the report.
        output_price: of a million tokens in answers, for the report.
    """
    if model_path is not None:
        raise UserError(
            f"--builder remote excludes --model-path {model_path}, since nothing is loaded here. "
            "Leave it out: --builder.name is the model."
        )
    endpoint = Endpoint(
        name,
        base_url=base_url,
        api_key_env=api_key_env,
        timeout=timeout,
        max_retries=max_retries,
        requests_per_minute=requests_per_minute,
        input_price=input_price,
        output_price=output_price,
    )
    return endpoint, None, {"": base_url or "openai"}


@model_register("remote", without_effect=("concurrency",))
def remote(
    endpoint: Endpoint,
    processor: None,
    *,
    images: Sequence[Any],
    prompts: Sequence[Rendered],
    concurrency: int = 8,
    **request: Any,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Requests to the endpoint, in parallel; answers are kept as they arrive.

    Args:
        concurrency: requests under way at a time; --batch-size of them are prepared.

    Yields:
        (place, answer) as answers arrive: text, finish_reason, usage and the model's full name; or
        only `error`, where one request failed for good.

    Raises:
        UserError: a wrong key, URL or model name, with which all requests would fail.
    """
    bodies = request_bodies(endpoint, prompts, images, **request)
    client = endpoint.client()
    import openai

    hopeless = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        endpoint.pace.wait()
        response = send(client, body)
        if not getattr(response, "choices", None):
            told = str(response)[:200]
            raise RemoteError(f"the answer of {endpoint.name} has no choices: {told}")
        return _priced(endpoint, _answer(response.model_dump()))

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        waiting = {pool.submit(ask, body): place for place, body in enumerate(bodies)}
        for done in as_completed(waiting):
            try:
                answer = done.result()
            except Exception as error:  # the package and its dependencies raise many types
                what = f"{type(error).__name__}: {str(error)[:500]}"
                if isinstance(error, hopeless):
                    raise UserError(
                        f"{endpoint.base_url or 'The server'} refuses the model {endpoint.name!r} "
                        f"({what}). Check `builder.name`, `builder.base_url` and the key in the "
                        f"environment variable {endpoint.api_key_env}."
                    ) from error
                answer = {"error": what}
            yield waiting[done], answer
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def request_bodies(
    endpoint: Endpoint,
    prompts: Sequence[Rendered],
    images: Sequence[Any],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    max_image_side: int | None = None,
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
    send_temperature: bool = True,
    extra: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return the body of a chat request for each prompt.

    Args:
        max_image_side: longest side of a picture, in pixels; larger ones are scaled down.
        max_tokens_field: name of the field for the longest answer at the endpoint.
        send_temperature: send temperature and seed, which some reasoning models refuse.
        extra: further fields of the request, such as {"top_p": 0.9}.
    """
    limit = {max_tokens_field: max_new_tokens}
    drawn = {"temperature": temperature, "seed": seed} if send_temperature else {}
    bodies = []
    for prompt, row in zip(prompts, images, strict=True):
        messages = messages_of(prompt, row, name=prompt.name, max_image_side=max_image_side)
        body = {"model": endpoint.name, "messages": messages, **limit, **drawn}
        if isinstance(prompt, Conversation) and prompt.tools:
            body["tools"] = list(prompt.tools)
        bodies.append({**body, **(extra or {})})
    return bodies


def _priced(endpoint: Endpoint, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with what its tokens cost, where a price is known."""
    prices = (endpoint.input_price, endpoint.output_price)
    if "usage" not in answer or prices == (None, None):
        return answer
    read, written = (answer["usage"][name] for name in USAGE)
    cost = (read * (prices[0] or 0.0) + written * (prices[1] or 0.0)) / 1_000_000
    return {**answer, "cost": cost}


def _answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of the JSON of an answer."""
    choice, usage = body["choices"][0], body.get("usage") or {}
    return {
        "text": choice["message"].get("content") or "",
        "finish_reason": choice.get("finish_reason"),
        "usage": {name: int(usage.get(name) or 0) for name in USAGE},
        "answered_by": body.get("model"),
    }


@model_register("batch_file", without_effect=("requests_path", "answers_path"))
def batch_file(
    endpoint: Endpoint,
    processor: None,
    *,
    images: Sequence[Any],
    prompts: Sequence[Rendered],
    requests_path: str = "runs/requests",
    answers_path: str | None = None,
    **request: Any,
) -> list[dict[str, Any] | None]:
    """Files of requests for an offline batch API; run again with its answers.

    Args:
        requests_path: folder of the .jsonl files to submit.
        answers_path: returned .jsonl file, or a folder of them.
    """
    bodies = request_bodies(endpoint, prompts, images, **request)
    answers = _answers_once(answers_path) if answers_path else {}
    found = [answers.get(body_key(body)) for body in bodies]
    waiting = [body for body, answer in zip(bodies, found, strict=True) if answer is None]
    _files_once(requests_path).add(waiting)
    return [answer and _priced(endpoint, answer) for answer in found]


def body_key(body: dict[str, Any]) -> str:
    """Return a hash of the request: the same request gets the same answer."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# Files of requests for offline batch APIs, and returned files of answers, have one JSON object a
# line, {"custom_id", "method", "url", "body"}. The id is a hash of the request, so no answer is
# taken for another question's.
URL = "/v1/chat/completions"
MAX_REQUESTS = 50_000  # OpenAI accepts no more in one file
MAX_BYTES = 190 * 2**20  # OpenAI accepts 200 MB


class RequestFiles:
    """Appends requests to requests-00001.jsonl and further files; each request once.

    Args:
        folder: folder of these files; requests of an earlier, stopped run are kept.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.written: set[str] = set()
        self._number, self._num_lines = 1, 0
        for number, path in enumerate(self.paths(), 1):
            cut_torn_line(path)
            lines = path.read_text(encoding="utf-8").splitlines()
            self.written |= {json.loads(line)["custom_id"] for line in lines}
            self._number, self._num_lines = number, len(lines)

    def paths(self) -> list[Path]:
        """Return the files in order of their numbers."""
        return sorted(self.folder.glob("requests-*.jsonl"))

    def add(self, bodies: list[dict[str, Any]]) -> None:
        """Write the requests that are not in the files yet."""
        for body in bodies:
            key = body_key(body)
            if key in self.written:
                continue
            request = {"custom_id": key, "method": "POST", "url": URL, "body": body}
            line = (json.dumps(request, ensure_ascii=False) + "\n").encode()
            with self._path_for(len(line)).open("ab") as file:
                file.write(line)
            self.written.add(key)
            self._num_lines += 1

    def _path_for(self, num_bytes: int) -> Path:
        path = self.folder / f"requests-{self._number:05d}.jsonl"
        size = path.stat().st_size if path.is_file() else 0
        is_too_large = size > 0 and size + num_bytes > MAX_BYTES
        if self._num_lines < MAX_REQUESTS and not is_too_large:
            return path
        self._number, self._num_lines = self._number + 1, 0
        return self._path_for(num_bytes)


def read_answers(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return custom_id -> answer of one file of results, or of all `*.jsonl` in a folder.

    An answer has text, finish_reason and usage, or `error` where the request failed.

    Raises:
        UserError: there is no such file.
        DataError: a line is not an answer; the error names file and line.
    """
    place = Path(path).expanduser()
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise UserError(
            f"There are no answers at {path}. Give the .jsonl file that the batch API returned, or "
            "a folder with such files."
        )
    found = {}
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                response = row.get("response") or {}
                if row.get("error") or response.get("status_code", 200) >= 400:
                    why = json.dumps(row.get("error") or response.get("body"))[:500]
                    found[row["custom_id"]] = {"error": why}
                else:
                    found[row["custom_id"]] = _answer(response["body"])
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise DataError(
                    f"{file}:{number}: this is not an answer of a batch API "
                    f"({type(error).__name__}: {error}). Give the file as it was downloaded: "
                    "objects with custom_id and response.body.choices."
                ) from error
    return found


# a model part is called for each batch of an evaluation
_answers_once = functools.cache(read_answers)
_files_once = functools.cache(RequestFiles)
