"""Make data/manpages_instruct.jsonl from installed manual pages: what does a command do?"""

import argparse
import gzip
import json
import random
import re
from pathlib import Path

QUESTIONS = (
    "What does the command `{name}` do?",
    "What is `{name}` for?",
    "Describe the Linux command `{name}` in one line.",
    "I found `{name}` in a shell script. What is it?",
)
NAME_SECTION = re.compile(
    r'^\.S[Hh] "?NAME"?\s*\n(?P<body>.*?)(?=^\.S[Hh])', re.MULTILINE | re.DOTALL
)
ENTRY = re.compile(r"^(?P<names>[\w.+-]+(?:, [\w.+-]+)*) - (?P<text>.+)$")


def plain(roff: str) -> str:
    """Return the text of a piece of roff, without fonts, macros and escapes."""
    text = re.sub(r"\\f[BIRP]|\\f\(\w\w|\\&|\\s[-+]?\d", "", roff)
    text = text.replace("\\-", "-").replace("\\(aq", "'").replace("\\(em", "-")
    lines = [line for line in text.splitlines() if not line.startswith((".", "'"))]
    return " ".join(" ".join(lines).split())


def read_page(path: Path) -> tuple[str, str] | None:
    """Return (command, description) of a page; None where its first line has another form."""
    try:
        roff = gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    section = NAME_SECTION.search(roff)
    entry = ENTRY.match(plain(section["body"])) if section else None
    if entry is None or "\\" in entry["text"] or not 12 <= len(entry["text"]) <= 110:
        return None
    return path.name.split(".")[0], entry["text"]


def main(source: str, target: str, num_rows: int) -> None:
    pages = [*Path(source).glob("man1/*.gz"), *Path(source).glob("man8/*.gz")]
    found: dict[str, str] = {}
    for path in sorted(pages):
        page = read_page(path)
        if page is not None and page[1] not in found.values():
            found.setdefault(*page)
    names = sorted(found)
    random.Random(0).shuffle(names)
    with Path(target).open("w", encoding="utf-8") as file:
        for index, name in enumerate(sorted(names[:num_rows])):
            text = found[name][0].upper() + found[name][1:]
            row = {
                "id": f"man-{name}",
                "question": QUESTIONS[index % len(QUESTIONS)].format(name=name),
                "answer": text if text.endswith(".") else text + ".",
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{min(num_rows, len(names))} of {len(pages)} pages are in {target}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="folder of manual pages: /usr/share/man")
    parser.add_argument("target", help="file of the rows")
    parser.add_argument(
        "num_rows", nargs="?", type=int, default=800, help="most rows (%(default)s)"
    )
    main(**vars(parser.parse_args()))
