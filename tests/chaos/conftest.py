"""Imports what the entry file needs, once: forked runs start from there and take a second."""

from commands import train as train_pp  # noqa: F401
