"""Weights in files: loading one stage, random starts, saving, adapters, export."""
