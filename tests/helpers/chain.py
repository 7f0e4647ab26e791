"""The chain of stages of `stageline/checking/batches.py`, by the name that tests know."""

from stageline.checking.batches import LossFn, drop_pixels, evaluate_chain, run_chain

__all__ = ["LossFn", "drop_pixels", "evaluate_chain", "run_chain"]
