"""Find prose that is not plain English of the field: docs, help, errors, log, docstrings, comments.

    python tools/prose.py                    # hits by folder and by rule
    python tools/prose.py --show W1 docs     # each hit of a rule, or of all, below some paths
    python tools/prose.py --check            # fail where a folder has more hits than recorded
    python tools/prose.py --record           # record fewer hits; scripts/test.sh runs --check

The rules are those of CONTRIBUTING.md. Text in backquotes or in a code block is not prose.
"""

import argparse
import ast
import collections
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
KINDS = ("docs", "help", "error", "log", "summary", "docstring", "comment")
PUBLIC = ("docs", "help", "error", "log")


class Rule(NamedTuple):
    """A pattern that is not wanted in some kinds of prose, and what to write instead."""

    kinds: tuple[str, ...]
    pattern: re.Pattern[str]
    advice: str


def _words(pattern: str, advice: str, kinds: tuple[str, ...] = KINDS) -> Rule:
    return Rule(kinds, re.compile(pattern, re.IGNORECASE), advice)


def _exact(pattern: str, advice: str, kinds: tuple[str, ...] = KINDS) -> Rule:
    return Rule(kinds, re.compile(pattern), advice)


RULES = {
    "E1": _exact(
        r"\b(was|were) expected\b|\bExpected: |\bcame\b",
        "say what is wrong and what to do",
        ("error",),
    ),
    "D1": _exact(
        r"^(What|Where|Which|How|Who|Whose|When|Why) (?!.*\?$)",
        "a verb or a noun phrase",
        ("summary",),
    ),
    "D2": _exact(
        r"^(Of|Those|As|Until|So many|Such|Nothing|At most|Below|Beside|By|From now on) ",
        "a verb or a noun phrase",
        ("summary",),
    ),
    "C1": _exact(
        r"^(of|what|those|whose|as|late|less|so many|such) ",
        "a clause with a subject",
        ("comment",),
    ),
    "W1": _words(r"\bbeside\b", "next to, alongside, in addition to"),
    "W2": _words(r"\banew\b", "again"),
    "W3": _words(r"\b(go|goes|going|gone|went) on\b(?! (to|linear|an? GPU))", "continue, resume"),
    "W4": _words(r"\b(un)?learnt\b", "trained on, in the loss"),
    "W5": _words(
        r"\bkin\b|\bin silence\b|\bwithout a word\b|\bwere it\b|\bcome by\b", "plain words"
    ),
    "W6": _words(
        r"\b(the|this|our|of the) (house|shelf|rooms?|door)\b", "repository, built-in, subpackage"
    ),
    "W7": _words(r"\b(ours|theirs)\b", "name the owner"),
    "W8": _words(r"\b(lies|lie|lay)\b(?! (apart|far))", "is, is stored"),
    "W9": _words(r"\b(nobody|somebody|anybody|whoever)\b", "name the actor"),
    "W10": _words(r"\bthe library('s)?\b", "transformers, datasets, tokenizers"),
    "S1": _words(
        r"(?<!let )(?<!stand )(?<!each )(?<!only )(?<!as )(?<!run )"
        r"\b(?!is|are|was|be|left|it|each|only|as|run)\w+ alone\b",
        "only X",
    ),
    "S2": _words(
        r"(?<!there )\b(is|are|was|were) no (?!longer\b|more\b|such\b|need\b|way\b|room\b|other\b"
        r"|different\b|better\b|larger\b|smaller\b|less\b)[a-z]",
        "is not a X",
    ),
    "S3": _words(r"\b(so many|so much)\b(?! (as|that|more|faster|larger))", "N"),
    "S4": _exact(
        r"(?:^|[.;:] )Of (?!course)[a-z`][^,.]{2,40}?,? "
        r"(?:the|each|all|both|only|its|what|one|none|no|it)\b",
        "put the subject first",
    ),
    "S5": _words(
        r"\b(is|are|was|were) to (?!\d|the\b|a\b|date\b)(be )?[a-z]+\b",
        "must, should, will",
        PUBLIC,
    ),
    "H1": _words(r"\b[01]: (none|never|any|all|no|at)\b", "0 = off", ("help",)),
}


class Hit(NamedTuple):
    """A sentence that a rule does not want."""

    rule: str
    file: str
    line: int
    text: str


def text_of(node: ast.AST) -> str:
    """The text of a string expression, with {} where values go."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{}" if isinstance(v, ast.FormattedValue) else text_of(v) for v in node.values
        )
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return ""


def python_prose(source: str) -> Iterator[tuple[str, int, str]]:
    """(kind, line, text) of docstrings, errors, help, log and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            summary, _, rest = (ast.get_docstring(node) or "").partition("\n")
            if summary:
                yield "summary", node.body[0].lineno, summary
                yield "docstring", node.body[0].lineno, rest
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            told = [text_of(one) for one in [*node.args, *(item.value for item in node.keywords)]]
            if name.endswith("Error") or name == "broken":
                yield "error", node.lineno, " ".join(told)
            elif name in ("option", "free_option"):
                yield "help", node.lineno, " ".join(told[1:])
            elif name in ("say", "print", "warn"):
                yield "log", node.lineno, told[0] if told else ""
    last, first, words = -1, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"# ?(type|noqa|fmt|pragma)\b|#!", token.string
        ):
            continue
        if token.start[0] != last + 1 and words:  # lines below each other are one comment
            yield "comment", first, words
            words = ""
        first, last = first if words else token.start[0], token.start[0]
        words = f"{words} {token.string.lstrip('# ')}".strip()
    yield "comment", first, words


def markdown_prose(source: str) -> Iterator[tuple[str, int, str]]:
    """("docs", line, text) of each paragraph outside of code blocks."""
    is_code, first, words = False, 0, ""
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        if is_code or not line.strip() or line.lstrip().startswith(("```", "|", "#", "-")):
            if words:
                yield "docs", first, words
            words = ""
        if not is_code and line.strip() and not line.lstrip().startswith("```"):
            first, words = first if words else number, f"{words} {line.strip()}".strip()


def find_hits(root: Path = ROOT) -> list[Hit]:
    """Every hit in the files that git knows."""
    listed = ["git", "-C", str(root), "ls-files", "*.py", "*.md"]
    found = []
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
        path = root / name
        is_skipped = name.startswith(("benchmarks/", "tests/golden")) or ".zh." in name
        if is_skipped or name == "tools/prose.py" or not path.is_file():
            continue
        read = python_prose if path.suffix == ".py" else markdown_prose
        for kind, line, text in read(path.read_text(encoding="utf-8")):
            plain = " ".join(re.sub(r"`[^`]*`", "`x`", text).split())
            for rule, (kinds, pattern, _) in RULES.items():
                if kind in kinds:
                    found += [Hit(rule, name, line, plain) for _ in pattern.findall(plain)]
    return found


def folder_of(name: str) -> str:
    """The folder that a file is counted in: two levels of stageline and tests, else one."""
    parts = name.split("/")
    deep = 2 if parts[0] in ("stageline", "tests") else 1
    return "/".join(parts[: min(deep, len(parts) - 1)]) or "root"


def main() -> int:
    """Print, check or record; 1 where a folder has more hits than recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="only below these")
    parser.add_argument("--show", nargs="?", const="", metavar="RULE", help="print each hit")
    parser.add_argument("--check", action="store_true", help="compare with what is recorded")
    parser.add_argument(
        "--record", action="store_true", help="write the counts to tools/prose.json"
    )
    given = parser.parse_args()
    hits = [hit for hit in find_hits() if hit.file.startswith(tuple(given.paths) or "")]
    counts = dict(sorted(collections.Counter(folder_of(hit.file) for hit in hits).items()))
    if given.show is not None:
        for hit in hits:
            if given.show in ("", hit.rule):
                advice = RULES[hit.rule].advice
                print(f"{hit.file}:{hit.line}: {hit.rule} ({advice}): {hit.text[:160]}")
    elif given.record:
        RECORD.write_text(json.dumps(counts, indent=2) + "\n")
    elif given.check:
        recorded = json.loads(RECORD.read_text())
        worse = {one: count for one, count in counts.items() if count > recorded.get(one, 0)}
        for one, count in worse.items():
            print(
                f"{one} has {count} hits, {recorded.get(one, 0)} are recorded. See them with "
                f"`python tools/prose.py --show` and write them otherwise."
            )
        return int(bool(worse))
    else:
        for name, count in counts.items():
            print(f"{count:5} {name}")
        by_rule = collections.Counter(hit.rule for hit in hits)
        print(" ".join(f"{rule} {by_rule[rule]}" for rule in RULES if by_rule[rule]))
        print(f"{len(hits)} hits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
