"""The options of an evaluation's report."""

from dataclasses import dataclass

from options.fields import option


@dataclass(kw_only=True)
class ReportOptions:
    """Report"""

    compare_with: str | None = option(
        None, "predictions.jsonl of another run on the same samples: paired differences",
        is_path=True,
    )  # fmt: skip
    bootstrap_resamples: int = option(
        10_000, "draws of a bootstrap interval; 0: none", at_least=0, at_most=1_000_000
    )
    bootstrap_seed: int = option(0, "seed of these draws", at_least=0)
    skip_bad_rows: int = option(
        0, "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run",
        at_least=0,
    )  # fmt: skip
