"""What the shelf's datasets and metrics are made of: digits, scenes, spatial sets, answers."""
