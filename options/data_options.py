"""The options of a run about bad data."""

from dataclasses import dataclass

from options.fields import option


@dataclass(kw_only=True)
class DataOptions:
    """Data"""

    skip_bad_rows: int = option(
        0,
        "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run. All rows "
        "are then looked at before the first step",
        at_least=0,
    )
