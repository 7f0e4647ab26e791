"""The errors a user can cause. Not for our own mistakes: those are assertions.

A message has four parts: what came, what was expected, why, what to do. An entry file prints it
without a traceback and ends with `exit_code`.
"""


class UserError(ValueError):
    """A wrong option, key, path or combination of them."""

    exit_code = 2


class PlanError(UserError):
    """A model that the planner cannot take to pieces; it may train all the same."""


class DataError(UserError):
    """A row or an image that cannot be used; the message names file and line."""

    exit_code = 3
