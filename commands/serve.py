"""Answer over HTTP as OpenAI's API does: chats, texts, tools, pictures, streams; with a web page.

python serve.py --model-path my_model --num-stages 2

The stages are processes of their own and decode together; the first one listens. SIGTERM and Ctrl-C
let what is under way finish for --http.shutdown_seconds, a second signal ends at once.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from commands import check_installed, quiet_transformers, start
from options.serve import ServeConfig, named_adapters
from parse_args import parse_serve_args
from stageline.distributed.stop import StopWords, speak_of_stops, stop_requested
from stageline.errors import UserError
from stageline.serving.settings import ServerSettings, check_certificate, is_local, read_api_keys

SHELF = ("train_model", "prompt_fn")
SECONDS_TO_END = 30.0  # in addition to --http.shutdown_seconds
STOP_WORDS = StopWords(
    first="Nothing more is taken; answers under way may finish",
    again="ends at once",
    early="before anything was served",
    at_once=", with answers under way",
)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def main() -> int:
    """Serve until a signal comes; return the exit code."""
    speak_of_stops(STOP_WORDS)
    config = start(parse_serve_args, *SHELF)
    run = config.run
    check_installed("fastapi", "uvicorn", "prometheus_client", extra="serve")
    api_keys = read_api_keys(run.api_key_env, run.http.api_key_file)
    check_certificate(run.http.ssl_certfile, run.http.ssl_keyfile)
    from commands.stages import place_stages, prepare
    from stageline.distributed.launch import launch_if_needed
    from stageline.distributed.watchdog import WatchdogRules

    rules = WatchdogRules(stop_deadline=run.http.shutdown_seconds + SECONDS_TO_END)
    run, num_processes = place_stages(run)
    launch_if_needed(num_processes, rules=rules)
    # the process that starts the others needs none of these
    from commands.decode_run import open_decoding
    from stageline.serving.app import make_app, serve_until
    from stageline.serving.prompts import PromptMaker
    from stageline.serving.service import Service

    quiet_transformers()
    stop_requested()  # on each rank: rank 0 makes all of them end in order
    adapters = named_adapters(run)
    with open_decoding(run, beside=tuple(adapters.values())) as engine:
        if engine is None:
            return 0
        settings = make_settings(run, api_keys, name=engine.model_name, adapters=tuple(adapters))
        if not api_keys and not is_local(run.host):
            print(
                f"warning: --host {run.host} lets other machines ask without an API key. Add "
                "--api-key-env or --http.api_key_file.",
                file=sys.stderr,
            )
        prepare(config, engine.processor, engine)
        prompts = PromptMaker(
            engine.processor,
            render=config.parts["prompt_fn"].bound,
            image_token=config.parts["image_token"].bound,
            max_length=engine.max_length,
            max_images=settings.max_images,
            max_pixels=run.images.pixel_limit,
        )
        prompts.warm_up()  # tries the chat template once
        service = Service(engine, prompts, settings)
        serve_until(
            service,
            make_app(service),
            host=run.host,
            port=run.port,
            should_stop=stop_requested,
            shutdown_seconds=run.http.shutdown_seconds,
            tell=functools.partial(print, flush=True),
            **listening_options(run),
        )
    return 0


def listening_options(run: ServeConfig) -> dict[str, Any]:
    """Return uvicorn's options."""
    return {
        "ssl_certfile": run.http.ssl_certfile,
        "ssl_keyfile": run.http.ssl_keyfile,
        "limit_concurrency": run.http.max_connections + 1,  # the first number that uvicorn refuses
        "timeout_keep_alive": run.http.keep_alive_timeout,
    }


def make_settings(
    run: ServeConfig, api_keys: tuple[str, ...], *, name: str, adapters: tuple[str, ...] = ()
) -> ServerSettings:
    """Return the settings of the server of a model and its adapters, by their names."""
    name = run.served_model_name or name
    if name in adapters:
        raise UserError(
            f"an adapter has the name {name}, which the base has too. Rename it, or give "
            "--served-model-name."
        )
    return ServerSettings(
        model_name=name,
        adapters=adapters,
        api_keys=api_keys,
        **vars(run.limits),
        read_timeout=run.http.read_timeout,
        default_max_tokens=run.max_new_tokens,
        default_temperature=run.temperature,
        cors_origins=tuple(run.http.cors_origins or ()),
        hosts=(*LOCAL_HOSTS, run.host) if not api_keys and is_local(run.host) else ("*",),
    )
