"""Checks models before a cluster starts: `python -m controller_worker.model.model_check MODEL…`.

Holds: it rejects only a model whose first call must fail, with the error of that call. It sends no request, and imports
the library of a provider only if nothing else can tell.
Does not: check that a provider accepts a key.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from broker.contract import PATTERN_END
from broker.runtime import SYSTEM_CLOCK, UsageError
from controller_worker.model.registry import check_llm, check_own_endpoints
from controller_worker.providers import Profiles
from controller_worker.settings import read_model_variables


def check_model(name: str, env: Mapping[str, str], *, is_open: bool = False) -> None:
    """Reject a model that cannot be called.

    Args:
        name: the model that a conversation names; empty for the default model, if there is one.
        env: the variables of a controller worker.
        is_open: see `Profiles.is_open`.

    Raises:
        UsageError: the model is unknown or has no key, its script is broken, or a setting cannot be used.
    """
    profiles = Profiles.from_env(env, is_open=is_open)
    default = profiles.default
    if not name and (not default or default.endswith(PATTERN_END)):
        return
    config = profiles.load_config(profiles.find_reference(name or None))
    check_own_endpoints(config, name or config.model)
    # A quota table and conversations may have keys of their own, and a router calls other models.
    may_lack_key = bool(env.get("DECKHANDS_QUOTAS", "").strip() or config.own_endpoints or config.router)
    check_llm(config, SYSTEM_CLOCK, may_lack_key=may_lack_key)


def main() -> None:
    """Print the error of the first unusable model as JSON; an empty object if there is none."""
    env, is_open = read_model_variables()
    report = {}
    try:
        for name in sys.argv[1:]:
            check_model(name, env, is_open=is_open)
    except UsageError as error:
        report = {"error": error.message, "remedy": error.remedy}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
