"""Splits a transformers model between its layers, by the order of its modules' calls."""
