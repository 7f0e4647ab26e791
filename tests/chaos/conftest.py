"""Imports what the entry file needs, once: forked runs start from there and take a second."""

import train_pp  # noqa: F401
