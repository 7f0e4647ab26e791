"""What a build says at its end."""

from dataclasses import dataclass

from stageline.corpus.build_progress import MB


@dataclass(frozen=True)
class BuildReport:
    """What was built.

    Attributes:
        counts: of the cutter, by name: documents, segments, tokens, cut sentences ...
        bad_kinds: lines that gave no document, by kind.
        bad_path: where the first of them are listed; None: there are none.
        encoder: which implementation of the tokenizer did it.
        num_bytes: of the input, as it lies on the disk.
        seconds: of all starts together.
        num_bytes_before: of the input, that an earlier start had done.
    """

    path_prefix: str
    counts: dict[str, int]
    bad_kinds: dict[str, int]
    bad_path: str | None
    encoder: str
    num_bytes: int
    seconds: float
    num_bytes_before: int

    @property
    def num_bad(self) -> int:
        return sum(self.bad_kinds.values())

    def __str__(self) -> str:
        counts = ", ".join(
            f"{number:,} {name.removeprefix('num_').replace('_', ' ')}"
            for name, number in self.counts.items()
        )
        speed = self.num_bytes / MB / max(1e-9, self.seconds)
        lines = [
            f"{self.path_prefix}: {counts}",
            f"{self.num_bytes / MB:.1f} MB in {self.seconds:.1f} s, {speed:.1f} MB/s; "
            f"tokenizer: {self.encoder}",
        ]
        if self.num_bad:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in self.bad_kinds.items())
            lines.append(f"{self.num_bad:,} bad lines left out ({kinds}): see {self.bad_path}")
        return "\n".join(lines)
