"""Data sets of the user: files of any common kind, a register of sets, mixing, splits, streams."""
