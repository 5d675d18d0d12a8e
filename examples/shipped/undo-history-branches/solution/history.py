"""Undo and redo."""

from document import Document


class History:
    def __init__(self, text="", limit=100):
        self.document = Document(text)
        self.limit = limit
        self.steps = []
        self.position = 0
        self.mark = 0
        self.kind = None  # what may be joined to the last step

    @property
    def text(self):
        return self.document.text

    @property
    def changed(self):
        return self.position != self.mark

    def joined(self, at, old, new):
        """Return the last step with an edit added to it, or None."""
        if self.kind is None:
            return None
        last_at, last_old, last_new = self.steps[self.position - 1]
        if new and self.kind == "insert" and at == last_at + len(last_new):
            return last_at, "", last_new + new
        if len(old) == 1 and at == last_at and self.kind in ("one", "delete"):
            self.kind = "delete"
            return at, last_old + old, ""
        if len(old) == 1 and at == last_at - 1 and self.kind in ("one", "backspace"):
            self.kind = "backspace"
            return at, old + last_old, ""
        return None

    def edit(self, at, old, new):
        self.document.replace(at, old, new)
        step = self.joined(at, old, new)
        if step:
            self.steps[self.position - 1] = step
        else:
            del self.steps[self.position :]
            if self.mark is not None and self.mark > self.position:
                self.mark = None
            self.steps.append((at, old, new))
            self.position += 1
            self.kind = "insert" if new else "one" if len(old) == 1 else None
        if new and new[-1].isspace():
            self.kind = None
        if len(self.steps) > self.limit:
            self.steps.pop(0)
            self.position -= 1
            if self.mark is not None:
                self.mark = self.mark - 1 if self.mark else None

    def insert(self, at, text):
        if not text or not 0 <= at <= len(self.text):
            raise ValueError("nothing to insert, or no such place")
        self.edit(at, "", text)

    def delete(self, at, count=1):
        if count < 1 or not 0 <= at <= len(self.text) - count:
            raise ValueError("nothing to delete there")
        self.edit(at, self.text[at : at + count], "")

    def undo(self):
        self.kind = None
        if not self.position:
            return False
        self.position -= 1
        at, old, new = self.steps[self.position]
        self.document.replace(at, new, old)
        return True

    def redo(self):
        self.kind = None
        if self.position == len(self.steps):
            return False
        at, old, new = self.steps[self.position]
        self.document.replace(at, old, new)
        self.position += 1
        return True

    def saved(self):
        self.mark = self.position
        self.kind = None
