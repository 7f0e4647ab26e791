"""The guides name only existing files, links, commands and functions; both languages agree."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from commands.command_line import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*DOCS.glob("*.md"), *ROOT.glob("*.md")]
GUIDES = sorted(path for path in DOCS.glob("*.md") if ".zh." not in path.name)
PAIRS = [
    (ROOT / "README.md", ROOT / "README.zh.md"),
    *((DOCS / f"{name}.md", DOCS / f"{name}.zh.md") for name in ("start", "glossary")),
    *((DOCS / f"{name}.md", DOCS / f"{name}.zh.md") for name in ("add_a_model", "add_a_part")),
]
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def missing_on(page):
    """Links, named files, and commands (`python X.py`, `bash X.sh`, `stageline X`) of nowhere."""
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    yield from (t for t in targets if "://" not in t and not (page.parent / t).exists())
    rooms = "stageline|commands|options|tests|scripts|docs|benchmarks|models|examples"
    named = re.findall(rf"`((?:{rooms})/[\w./-]+)`", text)
    yield from (path for path in named if not (ROOT / path).exists())
    files = re.findall(r"\b(?:python|bash|sbatch) ((?:[\w/-]+/)?\w+\.(?:py|sh|slurm))\b", text)
    # a program of another project, which a page compares with Stageline's
    yield from (p for p in files if not (ROOT / p).is_file() and p != "preprocess.py")
    bash = "\n".join(block for kind, block in FENCE.findall(text) if kind == "bash")
    words = re.findall(r"^stageline ([a-z][a-z-]*)", bash, re.MULTILINE)
    yield from (word for word in words if word not in (*COMMANDS, "env"))


def test_links_files_and_commands_of_all_pages_exist():
    assert {page.name: found for page in PAGES if (found := list(missing_on(page)))} == {}


def test_every_guide_is_in_the_site_and_the_index_has_its_order():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    home, *groups = site
    assert home == {"Home": "index.md"}
    entries = [entry for group in groups for entries in group.values() for entry in entries]
    listed = [(title, page) for entry in entries for title, page in entry.items()]
    assert {page for _, page in listed} | {"index.md"} == {path.name for path in DOCS.glob("*.md")}
    index = (DOCS / "index.md").read_text(encoding="utf-8").partition("The pages, as")[2]
    assert re.findall(r"\[(.+?)\]\((.+?)\)", index) == listed


def test_chinese_pages_are_those_that_are_kept_equal():
    chinese = {path for _, path in PAIRS}
    assert {*DOCS.glob("*.zh.md"), *ROOT.glob("*.zh.md")} == chinese


@pytest.mark.parametrize("english, chinese", PAIRS, ids=lambda path: path.name)
def test_both_languages_have_the_same_sections_and_code(english, chinese):
    pages = [path.read_text(encoding="utf-8") for path in (english, chinese)]
    headings, rows, items, code = [], [], [], []
    for text in pages:
        plain = FENCE.sub("", text)
        headings.append(re.findall(r"^(#+) ", plain, re.MULTILINE))
        sections = re.split(r"^#+ .*$", plain, flags=re.MULTILINE)
        rows.append([len(re.findall(r"^\|", section, re.MULTILINE)) for section in sections])
        items.append([len(re.findall(r"^(?:-|\d+\.) ", section, re.M)) for section in sections])
        # comments are in the language of the page
        code.append([(kind, re.sub(r"\s*#.*", "", block)) for kind, block in FENCE.findall(text)])
    assert headings[0] == headings[1]
    assert rows[0] == rows[1]
    assert items[0] == items[1]
    assert [kind for kind, _ in code[0]] == [kind for kind, _ in code[1]]
    for (kind, one), (_, other) in zip(*code, strict=True):
        assert kind not in ("bash", "python") or one == other


def test_the_glossaries_explain_the_same_words():
    words = [
        re.findall(r"^\| ([\w, -]+) \|", (DOCS / name).read_text(), re.MULTILINE)
        for name in ("glossary.md", "glossary.zh.md")
    ]
    english = [word for word in words[0] if word != "word"]
    assert len(english) > 30
    assert english == [word for word in words[1] if not re.search("[一-鿿]", word)]


# -- docs/walk_*.md: `file.py`: `function`, `Class.method` ------------------------------


def defined(path):
    """Return names of functions, classes and `Class.method` of a file."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            names |= {f"{node.name}.{name}" for name in inner}
    return names


@pytest.mark.parametrize(("page", "least"), [("training", 13), ("sample", 15), ("checkpoint", 15)])
def test_the_walks_name_files_and_functions_that_exist(page, least):
    """Each row of their tables: number, what happens, file, functions in it."""
    text = (DOCS / f"walk_{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| (.+?) \| `([\w/]+\.py)` \| (.+?) \|$", text, re.MULTILINE)
    assert len(rows) >= least
    files = list(dict.fromkeys(file for _, file, _ in rows))
    if page == "training":
        assert (
            files.index("stageline/stages/causal_lm.py") < 14 and f"in {len(files)} files" in text
        )
    for _, file, cell in rows:
        functions = re.findall(r"`([\w.]+)`", cell)
        assert functions, file
        for function in functions:
            assert function in defined(ROOT / file), f"{file} has no {function}"
    # every function that a sentence names with brackets is in one of the files of the page
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    everything = set().union(*(defined(ROOT / file) for file in named))
    for function in re.findall(r"`([\w.]+)\(\)`", text):
        assert function in everything, function
