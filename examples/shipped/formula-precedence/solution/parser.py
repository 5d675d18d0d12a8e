"""Turning formulas into functions, by recursive descent."""

import math
import operator

from tokens import Mistake

COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne}
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
FUNCTIONS = {"max": (1, None), "min": (1, None), "abs": (1, 1), "if": (3, 3)}
WORDS = ("and", "or", "not")


def remainder(left, right):
    """Return the remainder with the sign of the left side."""
    if right == 0:
        raise ZeroDivisionError("remainder of a division by zero")
    return math.fmod(left, right)


def apply(function, left, right):
    return lambda: function(left(), right())


class Parser:
    """Each method returns a function without arguments, which evaluates what was read."""

    def __init__(self, tokens, names):
        self.tokens = tokens
        self.names = names
        self.at = 0

    def next(self):
        token = self.tokens[self.at]
        self.at += 1
        return token

    def peek(self):
        return self.tokens[self.at][1]

    def expect(self, text):
        kind, found, column = self.tokens[self.at]
        if found != text:
            raise Mistake(f"unexpected {found or 'end'}", column)
        self.at += 1

    def whole(self):
        value = self.expression()
        self.expect("")
        return value

    def expression(self):
        left = self.conjunction()
        while self.peek() == "or":
            self.next()
            left = apply_or(left, self.conjunction())
        return left

    def conjunction(self):
        left = self.negation()
        while self.peek() == "and":
            self.next()
            left = apply_and(left, self.negation())
        return left

    def negation(self):
        if self.peek() == "not":
            self.next()
            value = self.negation()
            return lambda: int(not value())
        return self.comparison()

    def comparison(self):
        left = self.sum()
        if self.peek() in COMPARISONS:
            compare = COMPARISONS[self.next()[1]]
            both = apply(compare, left, self.sum())
            return lambda: int(both())
        return left

    def sum(self):
        left = self.term()
        while self.peek() in ("+", "-"):
            function = ARITHMETIC[self.next()[1]]
            left = apply(function, left, self.term())
        return left

    def term(self):
        left = self.signed()
        while self.peek() in ("*", "/", "%"):
            function = ARITHMETIC.get(self.next()[1], remainder)
            left = apply(function, left, self.signed())
        return left

    def signed(self):
        if self.peek() == "-":
            self.next()
            value = self.signed()
            return lambda: -value()
        return self.power()

    def power(self):
        left = self.atom()
        if self.peek() == "^":
            self.next()
            return apply(operator.pow, left, self.signed())
        return left

    def atom(self):
        kind, text, column = self.next()
        if kind == "number":
            return lambda: float(text)
        if kind == "name" and text not in WORDS:
            if self.peek() == "(" and text in FUNCTIONS:
                return self.call(text, column)
            return lambda: self.look_up(text, column)
        if text == "(":
            value = self.expression()
            self.expect(")")
            return value
        raise Mistake(f"unexpected {text or 'end'}", column)

    def look_up(self, name, column):
        if name not in self.names:
            raise Mistake(f"unknown name {name}", column)
        return self.names[name]

    def call(self, name, column):
        self.next()
        values = []
        if self.peek() != ")":
            values.append(self.expression())
            while self.peek() == ",":
                self.next()
                values.append(self.expression())
        self.expect(")")
        least, most = FUNCTIONS[name]
        if len(values) < least or (most is not None and len(values) > most):
            raise Mistake(f"wrong number of arguments of {name}", column)
        if name == "if":
            return lambda: values[1]() if values[0]() else values[2]()
        function = {"max": max, "min": min, "abs": lambda items: abs(next(items))}[name]
        return lambda: function(value() for value in values)


def apply_and(left, right):
    return lambda: int(bool(left() and right()))


def apply_or(left, right):
    return lambda: int(bool(left() or right()))
