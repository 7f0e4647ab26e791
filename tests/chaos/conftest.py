"""Imports the entry file once, before any test: forked runs start from here."""

import train_pp  # noqa: F401
