"""Evaluating by recursive descent."""

from tokens import Mistake


class Parser:
    """Evaluate while reading."""

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

    def expression(self):
        left = self.term()
        if self.peek() in ("+", "-"):
            sign = self.next()[1]
            right = self.expression()
            return left + right if sign == "+" else left - right
        return left

    def term(self):
        left = self.power()
        if self.peek() in ("*", "/", "%"):
            sign = self.next()[1]
            right = self.term()
            return left * right if sign == "*" else left / right if sign == "/" else left % right
        return left

    def power(self):
        left = self.atom()
        while self.peek() == "^":
            self.next()
            left = left ** self.atom()
        return left

    def atom(self):
        kind, text, column = self.next()
        if kind == "number":
            return float(text)
        if kind == "name":
            return self.names[text]
        if text == "-":
            return -self.atom()
        if text == "(":
            value = self.expression()
            self.next()
            return value
        raise Mistake(f"unexpected {text or 'end'}", column)
