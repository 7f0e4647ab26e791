"""Splits layers into stages and runs the stages on a schedule."""
