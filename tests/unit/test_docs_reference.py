"""docs/options.md and docs/components.md are what the options and registries say."""

import os
from pathlib import Path

import pytest

from tests.helpers.docs_reference import pages

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["options.md", "components.md"])
def test_a_generated_page_is_up_to_date(name):
    text = pages()[name]
    if os.environ.get("STAGELINE_BLESS") == "1":
        (DOCS / name).write_text(text, encoding="utf-8")
    assert (DOCS / name).read_text(encoding="utf-8") == text, (
        "run STAGELINE_BLESS=1 bash scripts/test.sh tests/unit/test_docs_reference.py"
    )
