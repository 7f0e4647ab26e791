"""Compares a user's split model with the whole one: `stageline check`."""
