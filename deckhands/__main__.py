"""The command line as a module: `python -m deckhands`."""

from __future__ import annotations

from deckhands.cli.main import main

if __name__ == "__main__":
    main()
