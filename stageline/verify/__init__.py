"""Compares a user's split model with the whole one: `python check_model.py`."""
