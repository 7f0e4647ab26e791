"""The options of a chat with a server."""

from dataclasses import dataclass

from options.fields import OptionError, option


@dataclass(kw_only=True)
class ChatServerOptions:
    """A server that answers"""

    server: str | None = option(
        None, "address of a server with OpenAI's API, such as http://127.0.0.1:8000"
    )
    server_model: str | None = option(
        None, "the model's name there; default: the first that the server names"
    )
    api_key_env: str = option(
        "OPENAI_API_KEY", "environment variable that holds the key, if the server wants one"
    )


def check_server(run: ChatServerOptions, *, model_path: str | None) -> None:
    """Refuses a server together with a model that is loaded here.

    Raises:
        OptionError: names both.
    """
    if run.server is not None and model_path is not None:
        raise OptionError(
            f"--server {run.server} and --model-path {model_path} came together. One of them was "
            "expected, because a model answers either there or here: leave one out."
        )
    if run.server is None and run.server_model is not None:
        raise OptionError(
            f"--server-model {run.server_model} came without --server. The name belongs to a model "
            "of a server: give its address, or leave the name out."
        )
