"""Evaluating formulas."""

from parser import Parser
from tokens import Mistake, tokens

__all__ = ["Mistake", "evaluate"]


def evaluate(text, names=None):
    """Return the value of the formula."""
    parser = Parser(tokens(text), names or {})
    return parser.expression()
