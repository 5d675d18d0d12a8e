"""A text that can be changed."""


class Document:
    def __init__(self, text=""):
        self.text = text

    def replace(self, at, old, new):
        """Put new in the place of old."""
        self.text = self.text[:at] + new + self.text[at + len(old) :]
