"""The agents' prompts: templates beside the agents, filled in."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import jinja2


def render_prompt(name: str, **values: Any) -> str:
    """Return the prompt of a template; every value that it names must be given."""
    return _load_template(name).render(values)


@cache
def _load_template(name: str) -> jinja2.Template:
    text = resources.files("controller_worker.agents").joinpath("prompts", name).read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined).from_string(text)  # noqa: S701  (a prompt is not HTML)
