"""From encoded samples to micro-batches."""
