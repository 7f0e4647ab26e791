"""Building blocks of the built-in datasets, metrics and rewards: digits, reading of answers."""
