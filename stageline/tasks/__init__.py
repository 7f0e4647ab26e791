"""What shipped datasets, metrics and rewards are made of: digits, reading of answers."""
