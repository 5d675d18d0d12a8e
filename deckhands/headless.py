"""The headless mode as a module: `python -m deckhands.headless`."""

from __future__ import annotations

import sys

from deckhands.cli.headless import headless
from deckhands.cli.main import call

if __name__ == "__main__":
    sys.exit(call(sys.argv[1:], headless, name="python -m deckhands.headless"))
