"""Compute + - * / of numbers in a text. The text is parsed, never executed."""

import ast
import operator
from fractions import Fraction

from stageline.errors import DataError

LONGEST = 200  # characters; results have no more digits than that
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculated(text: str) -> str:
    """Return the value of an expression: whole, or with ten digits.

    Raises:
        DataError: it is too long, no arithmetic, or divides by zero.
    """
    try:
        if len(text) > LONGEST:
            raise ValueError(f"more than {LONGEST} characters")
        value = _value(ast.parse(text.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.10g}"
    except (ArithmeticError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise DataError(
            f"{text[:40]!r} cannot be calculated ({error}). Write numbers with + - * / and ()."
        ) from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{type(node).__name__} is not a number, nor one of + - * /")
