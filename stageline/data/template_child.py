"""Renders a chat template on a small conversation within limits; a program of its own.

`template_trial.py` starts it. It imports nothing of this project, and neither torch nor
transformers, so that it starts in a tenth of a second and fits into little memory.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The tag of transformers around what an assistant writes; here it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """The body as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def main() -> None:
    """Reads a task from standard input; answers with what happened, unless it is killed."""
    task = json.load(sys.stdin)
    limit(cpu_seconds=task["cpu_seconds"], num_bytes=task["num_bytes"])
    try:
        answer = render_all(task)
    except MemoryError:
        answer = {"refused": f"it needs more than {task['num_bytes'] // 10**6} MB"}
    print(json.dumps(answer))


def limit(*, cpu_seconds: float, num_bytes: int) -> None:
    """From here on: so much memory in all, and so much more time of a processor."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # its default is death, which no template can put off; time spent waiting does not count
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def render_all(task: dict[str, Any]) -> dict[str, str]:
    """Why the template is refused; nothing if it is not. That it fails is no reason."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime
    try:
        template = environment.from_string(task["template"])
    except jinja2.exceptions.TemplateError:
        return {}
    for variables in task["conversations"]:
        try:
            length = 0
            for part in template.generate(**variables):
                length += len(part)
                if length > task["num_chars"]:
                    return {"refused": f"it writes more than {task['num_chars']} characters"}
        except MemoryError:
            raise
        except jinja2.exceptions.SecurityError as error:
            if "attribute '_" in str(error):
                return {"refused": f"it reaches for the inside of Python ({error})"}
        except Exception:
            continue  # it expects other conversations
    return {}


def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter of that name, as transformers has it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def raise_exception(message: str) -> NoReturn:
    """What templates call to refuse a conversation."""
    raise jinja2.exceptions.TemplateError(message)


if __name__ == "__main__":
    main()
