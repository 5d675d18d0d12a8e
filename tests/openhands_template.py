"""The keys and values of OpenHands' `config.template.toml` (V0), without its comments on them."""

from pathlib import Path

TEMPLATE = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")


def uncomment(template: str = TEMPLATE) -> str:
    return "\n".join(line.removeprefix("#") for line in template.splitlines())
