"""Runs in the workspace of a check, by itself: calls the function that was asked for, as the hidden test says.

Holds: only a test that has run to its end counts: a program that prints something or exits on the way gives nothing.
Does not: resist code that reads this file.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

LIMIT_SECONDS = 120.0


def main() -> int:
    """Test the function in another interpreter; return 0 if it is right."""
    token = secrets.token_hex(16)
    child = [sys.executable, __file__, "--child"]
    try:
        done = subprocess.run(child, input=token, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"The function took longer than {LIMIT_SECONDS:.0f} seconds.")
        return 1
    is_right = done.returncode == 0 and done.stdout.endswith(token)
    print("The function is right." if is_right else (done.stderr or "The test did not end.")[-3000:])
    return 0 if is_right else 1


def test() -> None:
    """Test the function in this interpreter, and say the token only at the end."""
    asked = json.loads(Path(__file__).with_name("asked.json").read_text(encoding="utf-8"))
    program = f"{Path(asked['file']).read_text(encoding='utf-8')}\n\n{asked['test']}\n"
    names = {"__name__": "solution"}
    exec(compile(program, asked["file"], "exec"), names)
    names["check"](names[asked["entry_point"]])
    sys.stdout.write(sys.stdin.read())


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        test()
    else:
        sys.exit(main())
