"""Rows of the formats that people have their data in -> samples of one form.

A sample is `messages` (with `tools`, `system`), `chosen` and `rejected` for preferences, `label`
for KTO, or `text`; names of pictures are `images`, of films `videos`. Knows no files.
"""

from stageline.data.converters.choose import Converter, make_converter

__all__ = ["Converter", "make_converter"]
