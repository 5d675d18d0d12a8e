"""The settings of the face from the environment."""

from __future__ import annotations

import pytest

from broker.runtime.errors import UsageError
from deckhands.settings import CliSettings


def test_empty_values_count_as_unset():
    settings = CliSettings.from_env({"DECKHANDS_URL": " ", "LLM_MODEL": "", "LITELLM_MODEL": "acme/small"})
    assert (settings.url, settings.model) == (None, "acme/small")


def test_a_misspelt_name_is_not_ignored():
    with pytest.raises(UsageError, match=r"DECKHANDS_HOM is unknown.*DECKHANDS_HOME"):
        CliSettings.from_env({"DECKHANDS_HOM": "/srv"})


def test_a_sandbox_that_does_not_exist():
    with pytest.raises(
        UsageError, match=r"DECKHANDS_SANDBOX is 'Chroot'\. Use auto, bwrap, docker, kubernetes or none"
    ):
        CliSettings.from_env({"DECKHANDS_SANDBOX": "Chroot"})
