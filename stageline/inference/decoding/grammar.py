"""What the text of an answer has to be, as plain text that travels; see `matchers` for its use."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stageline.errors import UserError

Kind = Literal["json_schema", "regex", "lark"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "lark")
LONGEST = 2**18  # letters: it is compiled on the last stage while other answers wait
# without an upper bound a model may write white space until its tokens are used up
_SPACES = r"[ \t\n]{1,40}"


@dataclass(frozen=True)
class Grammar:
    """The whole answer matches it: no special token is in it but the one that ends the answer.

    Attributes:
        kind: a JSON schema (draft 2020-12 and before; the JSON has the properties in its order),
            a regular expression (Rust's, without look-around), or a grammar in Lark's syntax with
            the additions of llguidance.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"grammar is of kind {self.kind!r}; expected one of {KINDS}.")
        if not isinstance(self.text, str) or not 0 < len(self.text) <= LONGEST:
            size = f"{len(self.text)} letters" if isinstance(self.text, str) else repr(self.text)
            raise UserError(
                f"the text of the grammar is {size}; expected a text of 1 to {LONGEST} letters, "
                "as every step of the model waits while it is compiled."
            )


def json_grammar(schema: Mapping[str, Any], *, is_strict: bool = True) -> Grammar:
    """JSON of a schema; raises as `json_text`."""
    return Grammar("json_schema", json_text(schema, is_strict=is_strict))


def json_text(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """A schema as a grammar has it, also after `%json` in Lark's syntax.

    Args:
        is_strict: refuse keywords that can't be kept to, such as `not`; else they are left out.

    Raises:
        UserError: it can't be written as JSON.
    """
    options = {"lenient": not is_strict, "whitespace_pattern": _SPACES}
    try:
        return json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the schema is no JSON: {error}.") from None


JSON_OBJECT = json_grammar({"type": "object"})
