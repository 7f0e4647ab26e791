"""The training loop around the pipeline: optimizer, precision, gradient norm, log."""
