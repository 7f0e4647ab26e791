"""Markdown tables of what benchmarks/decoding.py measured."""

from collections.abc import Sequence

RATIOS = (
    ("ours", "naive"),
    ("ours", "two replicas"),
    ("ours", "transformers pp_size=2"),
    ("ours", "ours, prompts whole"),
)
TITLES = {
    "decode": "Decoding, tokens a second",
    "prefill": "Reading prompts, tokens a second",
    "long": "Reading long prompts, tokens a second",
}


def tables(results: Sequence[dict], *, dtype: str) -> str:
    """A table of rates, one of ratios and one of busy shares for each phase."""
    parts = []
    for phase, title in TITLES.items():
        found = [one for one in results if one["phase"] == phase]
        if found:
            parts.append(_phase(found, f"{title}, {dtype}"))
    return "\n\n".join(parts)


def line(result: dict) -> str:
    """One case in one line, to watch a run."""
    rates = ", ".join(f"{name} {found['rate']:.1f}" for name, found in result["ways"].items())
    return f"{result['phase']}, {_title(result)}: {rates}"


def _phase(results: Sequence[dict], title: str) -> str:
    names = list(results[0]["ways"])
    batches = [_title(one) for one in results]
    rates = [[name, *(f"{_of(one, name)['rate']:.1f}" for one in results)] for name in names]
    for top, bottom in RATIOS:
        if top in names and bottom in names:
            cells = [f"{_of(one, top)['rate'] / _of(one, bottom)['rate']:.2f}" for one in results]
            rates.append([f"**{top} / {bottom}**", *cells])
    busy = [
        [name, *("/".join(f"{share:.2f}" for share in _of(one, name)["busy"]) for one in results)]
        for name in names
    ]
    tables = [f"## {title}", _table(["way", *batches], rates)]
    tables += ["Share of the time that each process computes:", _table(["way", *batches], busy)]
    if any(found["equal"] < 1 for one in results for found in one["ways"].values()):
        equal = [[name, *(f"{_of(one, name)['equal']:.3f}" for one in results)] for name in names]
        tables += ["Share of tokens equal to generate's:", _table(["way", *batches], equal)]
    return "\n\n".join(tables)


def _title(result: dict) -> str:
    if result["phase"] == "long":
        return f"{result['num_rows']} of {result['length']} tokens"
    return f"batch {result['num_rows']}"


def _of(result: dict, name: str) -> dict:
    return result["ways"][name]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
