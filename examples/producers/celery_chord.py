"""Twenty agents at once, and one that summarises what they found: a Celery chord, from an application of your own.

    python examples/producers/celery_chord.py redis://127.0.0.1:6379/1 --model anthropic/claude-sonnet-4-5

The first argument is the address that `deckhands up` prints behind `celery:`, with the password. Nothing here
imports Deckhands.
"""

from __future__ import annotations

import argparse
import sys

from celery import Celery, chord

TOPICS = ["tests", "types", "names", "errors", "logging", "security", "docs", "packaging", "speed", "concurrency"]


def main() -> int:
    """Send the chord, wait for the summary, and print it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("address")
    options.add_argument("--model", default=None)
    options.add_argument("--agents", type=int, default=20)
    options.add_argument("--timeout", type=float, default=3600.0, help="seconds")
    chosen = options.parse_args()

    app = Celery(broker=chosen.address, backend=chosen.address)
    common = {"model": chosen.model, "labels": {"example": "celery-chord"}}

    def agent(task: str):
        return app.signature("deckhands.run", kwargs={"task": task, **common}, queue="deckhands")

    reviews = [
        agent(f"Say how a Python project can do better: {TOPICS[n % len(TOPICS)]}") for n in range(chosen.agents)
    ]
    # The results of all others are written behind the task of the last one.
    result = chord(reviews, app=app)(agent("Summarise the advice in ten lines."))
    summary = result.get(timeout=chosen.timeout)
    sys.stdout.write(f"{summary['message']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
