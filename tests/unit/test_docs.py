"""What the guides name exists: files, links, keys; and each guide has its other language."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
GUIDES = sorted(path for path in (ROOT / "docs").glob("*.md") if ".zh." not in path.name)
# files that a reader makes, named in commands
MADE = {"my_parts.py", "my_rows.py", "X/config.yaml"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:stageline|tests|scripts|docs|benchmarks|pp_models)/[\w./-]+)`", text)
    for path in named:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_each_guide_has_a_chinese_one_with_the_same_sections(guide):
    chinese = guide.with_name(guide.name.replace(".md", ".zh.md"))
    assert chinese.exists()
    if guide.name == "add_a_model.md":
        return  # shorter in Chinese
    levels = [
        re.findall(r"^(#+) ", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.M)
        for path in (guide, chinese)
    ]
    assert levels[0] == levels[1]


def test_the_glossaries_explain_the_same_words():
    words = [
        re.findall(r"^\| ([\w, -]+) \|", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        for name in ("glossary.md", "glossary.zh.md")
    ]
    english = [word for word in words[0] if word != "word"]
    assert (
        len(english) > 30
        and english == words[1][: len(english) + 9]
        or english == [word for word in words[1] if not re.search("[一-鿿]", word)]
    )
