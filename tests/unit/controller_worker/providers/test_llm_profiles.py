"""Named model settings: merging, and refused combinations."""

from pathlib import Path

import pytest

from broker.contract.llm_spec import ModelNotOffered
from controller_worker.providers.choices import Fallback
from controller_worker.providers.errors import LLMConfigError
from controller_worker.providers.profiles import Profiles

FILE = """
[llm]
model = "claude-sonnet-4-5"
api_key = "${FIRST_KEY}"
num_retries = 3
fallbacks = ["spare", {use = "long", on = ["context_window"]}]
completion_kwargs = {metadata = {team = "a"}}

[llm.spare]
api_key = "${SECOND_KEY}"

[llm.local]
model = "openai/my-own"
base_url = "http://127.0.0.1:8000/v1"
api_key = "none"
"""
ENV = {"FIRST_KEY": "key-1", "SECOND_KEY": "key-2"}


def profiles(tmp_path: Path, text: str = FILE, **env: str) -> Profiles:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return Profiles.from_env({"LLM_CONFIG": str(path)} | ENV | env)


def test_without_a_file_there_is_the_environment() -> None:
    found = Profiles.from_env({"LLM_MODEL": "gpt-4o"})
    assert (found.load_config().model, found.load_config("gpt-4o").model, found.names) == ("gpt-4o", "gpt-4o", ())
    with pytest.raises(ModelNotOffered, match=r"'gpt-5' is not offered here. Offered models: gpt-4o\."):
        found.load_config("gpt-5")


def test_names_without_a_known_price_are_listed(tmp_path: Path) -> None:
    text = (
        FILE
        + """
[llm.own]
model = "acme/large"
input_cost_per_token = 1e-6
output_cost_per_token = 2e-6

[llm.any]
model = "gemini/*"
"""
    )
    found = profiles(tmp_path, text, LLM_SCRIPTS_DIR="/scripts")
    assert found.list_unpriced() == ["local", "openai/my-own", "long"]
    asked = ["acme/large", "gpt-4o", "scripted/a.json", "gemini/gemini-2.5-pro", "gemini/none"]
    assert found.list_unpriced(asked) == ["local", "openai/my-own", "long", "gemini/none"]
    private = Profiles.from_env({"LLM_MODEL": "scripted/a.json"}, is_open=True)
    assert private.list_unpriced(["acme/small", "gpt-4o"]) == ["acme/small"]


def test_a_base_without_a_model_offers_scripts_and_fallbacks() -> None:
    found = Profiles.from_env({"LLM_SCRIPTS_DIR": "/scripts", "LLM_FALLBACKS": '["gpt-4o"]'})
    assert found.table.list_names("acme") == ["gpt-4o", "scripted/FILE", "replay/FILE"]
    assert found.load_config(found.find_reference("scripted/a.json", "acme")).scripts_dir == "/scripts"


def test_the_base(tmp_path: Path) -> None:
    config = profiles(tmp_path).load_config()
    assert (config.model, config.num_retries, config.secrets) == ("claude-sonnet-4-5", 3, ("key-1",))
    assert config.fallbacks == (Fallback(use="spare"), Fallback(use="long", on=frozenset({"context_window"})))
    assert config.completion_kwargs == {"metadata": {"team": "a"}}


def test_a_profile_is_the_base_and_its_own(tmp_path: Path) -> None:
    found = profiles(tmp_path)
    assert found.names == ("spare", "local")
    spare, local = found.load_config("spare", temperature=0.5), found.load_profile("local")
    assert (spare.model, spare.num_retries, spare.secrets, spare.temperature) == (
        *("claude-sonnet-4-5", 3),
        *(("key-2",), 0.5),
    )
    assert (local.model, local.base_url, local.num_retries) == ("openai/my-own", "http://127.0.0.1:8000/v1", 3)
    chosen = profiles(tmp_path, LLM_MODEL="local")  # wins over the model of the base
    assert chosen.load_config(chosen.find_reference("local", "acme")).model == "openai/my-own"


def test_the_environment_wins_over_the_base_and_reaches_no_profile(tmp_path: Path) -> None:
    found = profiles(tmp_path, LLM_API_KEY="key-3", LLM_NUM_RETRIES="2")
    assert (found.load_config().secrets, found.load_config().num_retries) == (("key-3",), 2)
    assert (found.load_config("spare").secrets, found.load_config("spare").num_retries) == (("key-2",), 3)


def test_keys_stay_with_their_address(tmp_path: Path) -> None:
    text = """
[llm]
model = "anthropic/claude-sonnet-4-5"
api_key = "anthropic-key"
fallbacks = ["anthropic/claude-haiku-4-5", "gemini/gemini-2.5-pro"]
[llm.other_provider]
model = "mistral/large"
[llm.other_address]
base_url = "http://127.0.0.1:9/v1"
[llm.same]
temperature = 0.5
[llm.many]
model = "groq/*"
api_key = "groq-key"
tenants = ["acme"]
"""
    found = profiles(tmp_path, text)
    offered = [name for name in found.table.list_names("x") if "/" in name]
    named = ["other_provider", "other_address", "same", *offered]
    assert {name: found.load_config(found.find_reference(name)).secrets for name in named} == {
        "other_provider": (),
        "other_address": (),
        "same": ("anthropic-key",),
        "anthropic/claude-sonnet-4-5": ("anthropic-key",),
        "mistral/large": (),
        "anthropic/claude-haiku-4-5": ("anthropic-key",),
        "gemini/gemini-2.5-pro": (),
    }
    assert found.load_config(found.find_reference("groq/llama", "acme")).secrets == ("groq-key",)
    for name, tenant in (("groq/llama", "x"), ("groq/../x", "acme"), ("groq/x?y", "acme"), ("many", "acme")):
        with pytest.raises(ModelNotOffered):
            found.find_reference(name, tenant)
    assert profiles(tmp_path, text, LLM_MODEL="openai/gpt-5").load_config().secrets == ()


BOUND = """
[llm]
model = "anthropic/claude-sonnet-4-5"
api_key = "anthropic-key"
fallbacks = ["gemini/gemini-2.5-pro", "anthropic/claude-haiku-4-5"]
completion_kwargs = {extra_headers = {Authorization = "Bearer canary-in-a-header"}}
[llm.other_provider]
model = "mistral/large"
[llm.other_address]
base_url = "http://127.0.0.1:9/v1"
[llm.many]
model = "groq/*"
api_key = "groq-key"
completion_kwargs = {extra_body = {api_key = "canary-in-a-body"}}
fallbacks = ["xai/grok"]
"""


@pytest.mark.parametrize("name", ["other_provider", "other_address", "gemini/gemini-2.5-pro", "xai/grok"])
def test_further_fields_stay_with_their_address(tmp_path: Path, name: str) -> None:
    found = profiles(tmp_path, BOUND)
    config = found.load_config(found.find_reference(name, "acme"))
    assert (config.completion_kwargs, config.secrets) == (None, ())


def test_further_fields_of_the_file_reach_no_environment_address(tmp_path: Path) -> None:
    for variable in ("LLM_BASE_URL", "LITELLM_BASE_URL"):
        moved = profiles(tmp_path, BOUND, **{variable: "http://127.0.0.1:9/v1"}).load_config()
        assert (moved.completion_kwargs, moved.secrets) == (None, ())


def test_keys_in_further_fields_are_secrets(tmp_path: Path) -> None:
    found = profiles(tmp_path, BOUND)
    for name in ("anthropic/claude-sonnet-4-5", "anthropic/claude-haiku-4-5"):
        config = found.load_config(found.find_reference(name, "acme"))
        assert set(config.secrets) == {"anthropic-key", "Bearer canary-in-a-header", "canary-in-a-header"}
        assert "canary" not in repr(config)
    assert "canary-in-a-body" in found.load_config(found.find_reference("groq/x", "acme")).secrets


LIMITED = """
[llm]
model = "anthropic/claude-sonnet-4-5"
api_key = "base-key"
[llm.theirs]
model = "openai/gpt-5"
api_key = "their-key"
tenants = ["other"]
fallbacks = ["openai/gpt-5-mini", "anthropic/claude-haiku-4-5"]
num_retries = 2
"""


def test_a_fallback_is_offered_where_its_profile_is(tmp_path: Path) -> None:
    found = profiles(tmp_path, LIMITED)
    for name in ("openai/gpt-5-mini", "anthropic/claude-haiku-4-5"):
        with pytest.raises(ModelNotOffered):
            found.find_reference(name, "acme")
        assert not found.table.offers(name, "acme")
        reference = found.find_fallback("theirs", name, "other")
        assert reference == found.find_reference(name, "other")
        assert found.load_config(reference).num_retries == 2
    assert found.load_config(found.find_reference("openai/gpt-5-mini", "other")).secrets == ("their-key",)
    assert found.load_config(found.find_reference("anthropic/claude-haiku-4-5", "other")).secrets == ()


def test_base_fallback_is_for_all_despite_a_limited_profile(tmp_path: Path) -> None:
    text = LIMITED.replace('api_key = "base-key"', 'api_key = "base-key"\nfallbacks = ["openai/gpt-5"]')
    found = profiles(tmp_path, text)
    assert (
        found.find_fallback("", "openai/gpt-5", "acme")
        == found.find_reference("openai/gpt-5", "acme")
        == "#openai/gpt-5"
    )
    assert found.find_fallback("", "openai/gpt-5", "other") == "theirs"


@pytest.mark.parametrize("value", ['"acme, beta"', '["acme", "beta"]'])
def test_tenants_are_a_list_or_names_with_commas(tmp_path: Path, value: str) -> None:
    found = profiles(tmp_path, f'[llm]\nmodel = "x"\n[llm.a]\ntemperature = 1\ntenants = {value}')
    assert [found.find_reference("a", tenant) for tenant in ("acme", "beta")] == ["a", "a"]
    with pytest.raises(ModelNotOffered):
        found.find_reference("a", "acme,beta")


@pytest.mark.parametrize(
    ("value", "complaint"), [("5", "Input should be a valid tuple"), ('" , "', "no tenant is named")]
)
def test_tenants_that_cannot_be_read_offer_to_none(tmp_path: Path, value: str, complaint: str) -> None:
    found = profiles(tmp_path, f'[llm]\nmodel = "x"\n[llm.a]\ntemperature = 1\ntenants = {value}')
    assert found.table.list_names("acme") == ["x"]
    with pytest.raises(LLMConfigError, match=complaint):
        found.load_profile("a")


def test_a_pattern_of_the_base_is_checked() -> None:
    found = Profiles.from_env({"LLM_MODEL": "bedrock/*"})
    with pytest.raises(LLMConfigError, match="'bedrock/\\*' cannot be a pattern"):
        found.load_config(found.find_reference("bedrock/x", "acme"))
    found = Profiles.from_env({"LLM_MODEL": "gemini/*", "LLM_API_KEY": "k"})
    assert found.load_config(found.find_reference("gemini/x", "acme")).secrets == ("k",)
    with pytest.raises(LLMConfigError, match=r"'gemini/\*' matches many models. Name one"):
        found.load_config()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[llm", "is not TOML"),
        ("[models]", "has no section [llm]."),
        ('[llm]\nmodel = "x"\nmodle = 1', "'modle' is not a model setting; did you mean 'model'?"),
        (
            '[llm]\nmodel = "x"\nfallbacks = [{use = "y", on = ["rate"]}]',
            "'rate' is not an error code; use one of auth",
        ),
        ('[llm]\nmodel = "x"\nfallbacks = [{on = ["rate_limit"]}]', "fallbacks.0.use (LLM_FALLBACKS): Field req"),
        (
            '[llm]\nmodel = "x"\napi_key = "${NO_KEY}"',
            "api_key needs the environment variable NO_KEY, which is not set",
        ),
        ('[llm]\napi_key = "k"', "No model is configured."),
        *(
            (f'[llm]\nmodel = "x"\ncompletion_kwargs = {{{name} = "v"}}', f"'{name}' cannot be set here; write {field}")
            for name, field in {
                "api_key": "api_key",
                "base_url": "base_url",
                "api_base": "base_url",
                "model": "model",
                "fallbacks": "fallbacks",
            }.items()
        ),
    ],
)
def test_invalid_profiles_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LLMConfigError) as caught:
        profiles(tmp_path, text).load_config()
    assert complaint in str(caught.value)


def test_bad_or_missing_file_or_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(LLMConfigError, match=r"LLM_CONFIG 'none.toml' cannot be read: No such file"):
        Profiles.from_env({"LLM_CONFIG": "none.toml"})
    with pytest.raises(LLMConfigError, match=r"There is no model profile 'spar'. Did you mean 'spare'\?"):
        profiles(tmp_path).load_profile("spar")
    with pytest.raises(LLMConfigError, match=r"Profile 'a': .* did you mean 'temperature'\?"):
        profiles(tmp_path, '[llm]\nmodel = "x"\n[llm.a]\ntemprature = 1').load_config("a")


def test_fallbacks_from_the_environment() -> None:
    names = Profiles.from_env({"LLM_MODEL": "x", "LLM_FALLBACKS": "a, b"}).load_config().fallbacks
    assert names == (Fallback(use="a"), Fallback(use="b"))
    given = Profiles.from_env({"LLM_MODEL": "x", "LLM_FALLBACKS": '["a", {"use": "b", "on": ["timeout"]}]'})
    assert given.load_config().fallbacks == (Fallback(use="a"), Fallback(use="b", on=frozenset({"timeout"})))
