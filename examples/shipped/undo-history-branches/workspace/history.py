"""Undo and redo."""

from document import Document


class History:
    def __init__(self, text="", limit=100):
        self.document = Document(text)
        self.limit = limit
        self.steps = []
        self.position = 0
        self.mark = 0

    @property
    def text(self):
        return self.document.text

    @property
    def changed(self):
        return self.position != self.mark

    def edit(self, at, old, new):
        self.document.replace(at, old, new)
        self.steps.insert(self.position, (at, old, new))
        self.position += 1
        if len(self.steps) >= self.limit:
            self.steps.pop(0)
            self.position -= 1

    def insert(self, at, text):
        self.edit(at, "", text)

    def delete(self, at, count=1):
        self.edit(at, self.text[at : at + count], "")

    def undo(self):
        if not self.steps:
            return False
        self.position -= 1
        at, old, new = self.steps[self.position]
        self.document.replace(at, new, old)
        return True

    def redo(self):
        if self.position == len(self.steps):
            return False
        at, old, new = self.steps[self.position]
        self.document.replace(at, old, new)
        self.position += 1
        return True

    def saved(self):
        self.mark = self.position
