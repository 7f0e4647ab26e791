"""Costs of a run in seconds and memory, and the best placement of its layers."""
