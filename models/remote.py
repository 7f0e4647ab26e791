"""Models behind an OpenAI-style endpoint: a builder part, and two model parts that ask it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from register import builder_register, model_register
from stageline.errors import UserError

if TYPE_CHECKING:
    from stageline.data.text.rendered import Rendered
    from stageline.inference.remote import Endpoint

# options that change no answer: with other values predictions are gone on with
OF_THE_WAY = ("api_key_env", "timeout", "max_retries", "requests_per_minute")
PRICES = ("input_price", "output_price")
FILES = ("requests_path", "answers_path")
MaxTokensField = Literal["max_tokens", "max_completion_tokens"]


@builder_register("remote", without_effect=(*OF_THE_WAY, *PRICES))
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
            f"--model-path {model_path} came with --builder remote. --builder.name alone was "
            "expected, because nothing is loaded here: leave --model-path out."
        )
    from stageline.inference.remote import Endpoint

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
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    concurrency: int = 8,
    max_image_side: int | None = None,
    max_tokens_field: MaxTokensField = "max_tokens",
    send_temperature: bool = True,
    extra: dict[str, Any] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Asks the endpoint, many at once; answers are kept as they come.

    Args:
        concurrency: requests on their way at a time; --batch-size is how many are prepared.
        max_image_side: scale larger pictures down to so many pixels.
        max_tokens_field: what the endpoint calls the longest answer.
        send_temperature: some reasoning models refuse temperature and seed.
        extra: further fields of the request, such as {"top_p": 0.9}.
    """
    from stageline.inference.remote import ask_all, request_bodies

    bodies = request_bodies(
        endpoint,
        prompts,
        images,
        max_image_side=max_image_side,
        send_temperature=send_temperature,
        temperature=temperature,
        seed=seed,
        extra=extra,
        **{max_tokens_field: max_new_tokens},
    )
    return ask_all(endpoint, bodies, concurrency=concurrency)


@model_register("batch_file", without_effect=FILES)
def batch_file(
    endpoint: Endpoint,
    processor: None,
    *,
    images: Sequence[Any],
    prompts: Sequence[Rendered],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    requests_path: str = "runs/requests",
    answers_path: str | None = None,
    max_image_side: int | None = None,
    max_tokens_field: MaxTokensField = "max_tokens",
    send_temperature: bool = True,
    extra: dict[str, Any] | None = None,
) -> list[dict[str, Any] | None]:
    """Writes requests for an offline batch API; run again with its answers.

    Args:
        requests_path: folder of the .jsonl files to hand in.
        answers_path: the .jsonl file that came back, or a folder of such.
        max_image_side: scale larger pictures down to so many pixels.
        max_tokens_field: what the endpoint calls the longest answer.
        send_temperature: some reasoning models refuse temperature and seed.
        extra: further fields of the request, such as {"top_p": 0.9}.
    """
    from stageline.inference.remote import offline_answers, request_bodies

    bodies = request_bodies(
        endpoint,
        prompts,
        images,
        max_image_side=max_image_side,
        send_temperature=send_temperature,
        temperature=temperature,
        seed=seed,
        extra=extra,
        **{max_tokens_field: max_new_tokens},
    )
    return offline_answers(endpoint, bodies, requests_path=requests_path, answers_path=answers_path)
