"""Tries a chat template of a model folder once, in a process with limits, before it is used here.

Templates are programs from elsewhere. The library's sandbox keeps them from files and from Python's
inside, and bounds neither time nor memory: a loop in a loop would hang a run, a product of a text
and a number would fill the machine. A template that misbehaves on some conversations only is not
found this way. The process runs this file, without torch and transformers: it starts in a tenth of
a second and fits into little memory.
"""

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 1.0
NUM_BYTES = 280_000_000
NUM_CHARS = 1_000_000
# only for a machine that is very busy, or asleep
_WALL_SECONDS = 120.0
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def check_template(template: object, *, source: str) -> None:
    """Refuses a chat template that takes too long, fills the memory or tries to break out.

    Args:
        template: a text, or several by name; anything else passes.
        source: where it came from, for the message.

    Raises:
        CheckpointError: it says which limit was passed.
    """
    from stageline.errors import CheckpointError  # not in the trial's process

    for one in template.values() if isinstance(template, dict) else [template]:
        reason = _refusal(one) if isinstance(one, str) else ""
        if reason:
            raise CheckpointError(
                f"the chat template of {source or 'the tokenizer'} is refused: {reason}, on a "
                f"conversation of four words. At most {CPU_SECONDS:g} s, {NUM_BYTES // 10**6} MB "
                f"and {NUM_CHARS} characters were expected: it would hang or end the run. Do not "
                "use it; put a chat_template.jinja that you trust into the folder."
            )


@functools.lru_cache(maxsize=64)
def _refusal(template: str) -> str:
    """Why the template may not be used; "" if it may. The same one is tried once in a process."""
    try:
        done = subprocess.run(
            # -P: the folder of the program holds files by the names of others'
            [sys.executable, "-P", __file__],
            input=json.dumps(template),
            capture_output=True,
            text=True,
            timeout=_WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_WALL_SECONDS:g} s"
    if done.returncode == -signal.SIGPROF:
        return f"it did not end within {CPU_SECONDS:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"its trial ended with {lines[-1] if lines else done.returncode}"
    return json.loads(done.stdout)


def _try() -> None:
    """The process with limits: a template comes in, why it is refused goes out."""
    import resource

    template = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (NUM_BYTES, NUM_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # its default is death, which no template can put off; time spent waiting does not count
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        reason = _render_all(template)
    except MemoryError:
        reason = f"it needs more than {NUM_BYTES // 10**6} MB"
    print(json.dumps(reason))


def template_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment


def _render_all(text: str) -> str:
    """Why the template is refused; "" if it isn't. That it fails is no reason."""
    environment = template_environment()
    try:
        template = environment.from_string(text)
    except jinja2.exceptions.TemplateError:
        return ""
    for messages in _conversations():
        variables = {"messages": messages, "add_generation_prompt": messages[-1]["role"] == "user"}
        try:
            length = 0
            for part in template.generate(**variables, **_TOKENS):
                length += len(part)
                if length > NUM_CHARS:
                    return f"it writes more than {NUM_CHARS} characters"
        except MemoryError:
            raise
        except jinja2.exceptions.SecurityError as error:
            if "attribute '_" in str(error):
                return f"it reaches for the inside of Python ({error})"
        except Exception:
            continue  # it expects other conversations
    return ""


def _conversations() -> Iterator[list[dict[str, Any]]]:
    """Contents as text and as parts, with and without a system message, an answer, a picture."""
    roles = {"system": "s", "user": "a", "assistant": "b"}
    for is_text in (True, False):
        system, user, assistant = (
            {"role": role, "content": text if is_text else [{"type": "text", "text": text}]}
            for role, text in roles.items()
        )
        yield [system, user, assistant, user, assistant]
        yield [user, assistant, user, assistant]
        yield [user, assistant, user]
    yield [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]


class _Generation(Extension):
    """The tag of transformers around what an assistant writes; here it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


if __name__ == "__main__":
    _try()
