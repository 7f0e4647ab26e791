"""The API tests of OpenAI's own Python package, against this server with a tiny untrained model.

    python benchmarks/openai_api_tests.py --source openai-3.54.0 --python path/of/python

`--source` is the unpacked source of the installed version of `openai` (`pip download openai
--no-binary openai --no-deps`), whose tests stay there. `--python` has pytest-asyncio besides what
this project needs. Claim: each test passes, or its failure has one of the causes below; another
failure ends the run with 1.
"""

import argparse
import collections
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
MODEL, TEXT_MODEL = "gpt-6-astra", "gpt-3.5-turbo-instruct"  # as the tests call them
# file -> the model that it asks for
FILES = {
    "test_models.py": MODEL,
    "test_completions.py": TEXT_MODEL,
    "chat/test_completions.py": MODEL,
    "chat/completions/test_messages.py": MODEL,
}
# what a failure says -> why it stays
CAUSES = {
    r"There is nothing at|This method is not known at": "a route of stored objects: "
    "this server keeps nothing",
    r"(?s)^test_method_create_with_all_params.*Error code: 400": "all fields of the package at "
    "once, some of which can't be honoured",
}


@contextlib.contextmanager
def tiny_server() -> Iterator[dict[str, str]]:
    """The addresses of one engine, by the names under which its model is served."""
    sys.path.insert(0, str(ROOT))
    import pp_models  # noqa: F401 (puts the parts on the shelf)
    from prompt_fn import auto, chat
    from register import train_model_register
    from stageline.checkpoint.load import quiet
    from tests.helpers.chat_templates import format_tokenizer
    from tests.helpers.decoding_engines import local_engine
    from tests.helpers.served import served
    from tests.helpers.tiny_checkpoints import tiny_whole

    tokenizer = format_tokenizer("qwen")
    with tempfile.TemporaryDirectory() as folder, quiet():
        tiny_whole("llama", folder, vocab_size=len(tokenizer) + 5, max_position_embeddings=2048)
        stage, _, _ = train_model_register["causal_lm"](
            config_path=None, processor_path=None, checkpoint_path=folder, stage=0, num_stages=1,
            is_piece=True,
        )  # fmt: skip
    engine = local_engine([stage], tokenizer, max_rows=8, max_length=2048)
    engine.stop_ids = (tokenizer.eos_token_id,)
    threading.Thread(target=engine.run, daemon=True).start()
    parts = {"render": chat, "image_token": auto, "default_max_tokens": 16}
    with (
        served(engine, model_name=MODEL, **parts) as one,
        served(engine, model_name=TEXT_MODEL, **parts) as other,
    ):
        yield {MODEL: f"{one.url}/v1", TEXT_MODEL: f"{other.url}/v1"}
    engine.stop()


def run_tests(python: str, source: Path, file: str, url: str) -> list[tuple[str, str | None]]:
    """(name, what its failure says or None) of each test in a file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ran = subprocess.run(
            [
                python, "-m", "pytest", f"tests/api_resources/{file}", "-q",
                "-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={report}",
            ],
            cwd=source, env={**os.environ, "TEST_API_BASE_URL": url},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ran.returncode not in (0, 1):
            raise SystemExit(f"their tests did not run:\n{ran.stdout}{ran.stderr}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [(case.get("name", ""), _failure(case)) for case in cases]


def _failure(case: ElementTree.Element) -> str | None:
    found = [one for kind in ("failure", "error") for one in case.findall(kind)]
    return f"{found[0].get('message')}\n{found[0].text}" if found else None


def cause_of(text: str) -> str | None:
    """Why a test fails, if that is known."""
    return next((cause for pattern, cause in CAUSES.items() if re.search(pattern, text)), None)


def main() -> int:
    """Prints a table; 1 if there is a failure without a cause."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    unknown, total = [], collections.Counter()
    print("| tests | ran | passed | failed, by cause |\n|---|---|---|---|")
    with tiny_server() as urls:
        for file, model in FILES.items():
            found = run_tests(args.python, args.source, file, urls[model])
            causes = collections.Counter()
            for name, failure in found:
                if failure is not None:
                    cause = cause_of(f"{name}\n{failure}")
                    causes[cause] += 1
                    if cause is None:
                        unknown.append(f"{file} {name}: {failure[:2000]}")
            passed = len(found) - causes.total()
            told = "; ".join(f"{count} {cause}" for cause, count in causes.items())
            print(f"| {file} | {len(found)} | {passed} | {told} |", flush=True)
            total.update(ran=len(found), passed=passed)
    print(f"\n{total['passed']} of {total['ran']} pass; {len(unknown)} fail without a known cause")
    print("\n\n".join(unknown))
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
