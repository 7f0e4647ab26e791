"""Tokens and money that the answers of a remote model took, from the predictions themselves."""

from collections.abc import Sequence
from typing import Any


def usage_of(predictions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over predictions that know their usage; empty where none does.

    Returns:
        num_answers, prompt_tokens, completion_tokens, and cost where prices were given.
    """
    known = [item for item in predictions if isinstance(item.get("usage"), dict)]
    if not known:
        return {}
    figures: dict[str, Any] = {"num_answers": len(known)}
    for name in ("prompt_tokens", "completion_tokens"):
        figures[name] = sum(int(item["usage"].get(name, 0)) for item in known)
    costs = [float(item["cost"]) for item in known if item.get("cost") is not None]
    if costs:
        figures["cost"] = sum(costs)
        figures["num_priced"] = len(costs)  # others were asked before prices were given
    return figures


def format_usage(figures: dict[str, Any]) -> str:
    """One line."""
    line = (
        f"{figures['num_answers']} answers: {figures['prompt_tokens']} tokens in prompts, "
        f"{figures['completion_tokens']} in answers"
    )
    if "cost" in figures:
        line += f", {figures['cost']:.6g} for {figures['num_priced']} of them"
    return line
