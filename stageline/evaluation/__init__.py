"""Evaluation: predictions into a file that can be continued, and a report with intervals."""
