"""Inference: placing a model on several devices, and generating in batches."""
