"""Which paths to leave out."""

from patterns import compile_path, match_path


def stripped(line):
    """Return the line without the blanks at its end, unless a backslash keeps one."""
    short = line.rstrip(" \t")
    backslashes = len(short) - len(short.rstrip("\\"))
    return line[: len(short) + 1] if backslashes % 2 and len(short) < len(line) else short


class Rules:
    """The patterns of a file."""

    def __init__(self, text):
        self.rules = []
        for line in text.splitlines():
            if line.startswith("#") or not stripped(line):
                continue
            line = stripped(line)
            back = line.startswith("!")
            line = line[back:]
            folder = line.endswith("/")
            self.rules.append((back, folder, compile_path(line.removesuffix("/"))))

    def decide(self, names, folder):
        for back, only_folders, pieces in reversed(self.rules):
            if (folder or not only_folders) and match_path(pieces, names):
                return not back
        return False

    def ignored(self, path):
        """Return whether the path should be left out."""
        names = path.removesuffix("/").split("/")
        for end in range(1, len(names)):
            if self.decide(names[:end], True):
                return True
        return self.decide(names, path.endswith("/"))
