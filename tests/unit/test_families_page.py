"""The page of models shows the worst result that was found for each name."""

from pathlib import Path

from benchmarks.families_page import FamilyResult, write_page


def test_the_worst_verdict_is_shown(tmp_path: Path) -> None:
    verdicts = [
        FamilyResult("llama", "text", 2, False, "equal"),
        FamilyResult("llama", "text", 3, True, "equal", largest=2e-16),
        FamilyResult("granite", "text", 2, False, "equal"),
        FamilyResult("granite", "text", 3, False, "WRONG", "loss 1e-02", 1e-2),
        FamilyResult("mamba", "text", 2, False, "equal"),
        FamilyResult("blt", "text", 2, False, "refused", "blt | no"),
        FamilyResult("pi0", "vision", 2, False, "no model", "no text"),
    ]
    write_page(verdicts, tmp_path / "models.md")
    text = (tmp_path / "models.md").read_text(encoding="utf-8")
    assert "| `llama` | 2, 3 | equal, sums in another order (2e-16) | float64 |  |" in text
    assert "| `granite` | 2, 3 | **wrong** | float64 | loss 1e-02 |" in text
    assert "| `mamba` | 2 | equal to the bit | float64 |  |" in text
    assert "| `blt` | 2 | refused | float64 | blt \\| no |" in text
    assert "| `pi0` | - | not tried | - | no text |" in text
    assert "Causal language models: 4; 1 equal to the bit, 1 equal, sums in another order" in text
    assert text.count("\n## ") == 2 and [path.name for path in tmp_path.iterdir()] == ["models.md"]
