"""Reads answers that a model wrote in free text: yes or no, an option, directions, clock, angle.

Pure strings. Each function returns None (directions: nothing) where the text does not say, which
counts as wrong. The rules are numbered in docs/metrics.md; comments "rule n" name them.
"""

from stageline.data.answers.choice import parse_choice
from stageline.data.answers.directions import parse_directions
from stageline.data.answers.negation import without_negated
from stageline.data.answers.numbers import is_clock, parse_angle, parse_clock
from stageline.data.answers.text import contains_words, normalize, says_nothing, without_question
from stageline.data.answers.truth import parse_truth

__all__ = [
    "contains_words",
    "is_clock",
    "normalize",
    "parse_angle",
    "parse_choice",
    "parse_clock",
    "parse_directions",
    "parse_truth",
    "says_nothing",
    "without_negated",
    "without_question",
]
