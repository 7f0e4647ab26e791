"""Tries a chat template of a model folder once, in a process with limits, before it is used here.

Templates are programs from elsewhere. The library's sandbox keeps them from files and from Python's
inside, and bounds neither time nor memory: a loop in a loop would hang a run, a product of a text
and a number would fill the machine. A template that misbehaves on some conversations only is not
found this way.
"""

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stageline.errors import CheckpointError

CPU_SECONDS = 1.0
NUM_BYTES = 280_000_000
NUM_CHARS = 1_000_000
# only for a machine that is very busy, or asleep
_WALL_SECONDS = 120.0
_CHILD = Path(__file__).with_name("template_child.py")
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def check_template(template: object, *, source: str) -> None:
    """Refuses a chat template that takes too long, fills the memory or tries to break out.

    Args:
        template: a text, or several by name; anything else passes.
        source: where it came from, for the message.

    Raises:
        CheckpointError: it says which limit was passed.
    """
    templates = template.values() if isinstance(template, dict) else [template]
    for one in templates:
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
    task = {
        "template": template,
        "conversations": list(_conversations()),
        "cpu_seconds": CPU_SECONDS,
        "num_bytes": NUM_BYTES,
        "num_chars": NUM_CHARS,
    }
    try:
        done = subprocess.run(
            # -P: the folder of the program holds files by the names of others'
            [sys.executable, "-P", str(_CHILD)],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=_WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_WALL_SECONDS:g} s"
    if done.returncode == -signal.SIGPROF:
        return f"it did not end within {CPU_SECONDS:g} s"
    if done.returncode < 0:
        return f"it ended its process by {signal.Signals(-done.returncode).name}"
    try:
        return json.loads(done.stdout).get("refused", "")
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return f"it could not be tried ({lines[-1] if lines else done.returncode})"


def _conversations() -> Iterator[dict[str, Any]]:
    """Variables of templates: contents as text and as parts, with and without a system message."""
    for form in ("text", "list"):
        turns = [_turn("user", "a", form), _turn("assistant", "b", form)]
        turns += [_turn("user", "c", form), _turn("assistant", "d", form)]
        for messages in ([_turn("system", "s", form), *turns], turns):
            yield {"messages": messages, "add_generation_prompt": False, **_TOKENS}
        yield {"messages": turns[:-1], "add_generation_prompt": True, **_TOKENS}
    picture = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}
    yield {"messages": [picture], "add_generation_prompt": True, **_TOKENS}


def _turn(role: str, text: str, form: str) -> dict[str, Any]:
    return {"role": role, "content": text if form == "text" else [{"type": "text", "text": text}]}
