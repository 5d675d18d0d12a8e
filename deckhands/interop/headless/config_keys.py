"""The keys of OpenHands' `config.toml` (V0, OpenHands 6.1, 12): the supported keys, and the notices for the others.

Holds: an unsupported key is refused if it would change the run, and listed if it would not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kind = Literal["text", "flag", "whole", "number", "texts", "table", "servers"]

SUPPORTED: Mapping[str, Mapping[str, Kind]] = {
    "core": {
        "default_agent": "text",
        "disable_color": "flag",
        "enable_browser": "flag",
        "enable_default_condenser": "flag",
        "git_user_email": "text",
        "git_user_name": "text",
        "max_budget_per_task": "number",
        "max_iterations": "whole",
        "runtime": "text",
        "save_trajectory_path": "text",
        "workspace_base": "text",
    },
    "agent": {
        "disabled_microagents": "texts",
        "enable_browsing": "flag",
        "enable_cmd": "flag",
        "enable_condensation_request": "flag",
        "enable_editor": "flag",
        "enable_finish": "flag",
        "enable_history_truncation": "flag",
        "enable_jupyter": "flag",
        "enable_mcp": "flag",
        "enable_plan_mode": "flag",
        "enable_prompt_extensions": "flag",
        "enable_som_visual_browsing": "flag",
        "enable_think": "flag",
        "fallback_to_legacy": "flag",
        "llm_config": "text",
        "prefer_sdk_agents": "flag",
        "timeout_seconds": "number",
    },
    "sandbox": {
        "base_container_image": "text",
        "runtime_container_image": "text",
        "runtime_startup_env_vars": "table",
        "use_host_network": "flag",
    },
    "security": {"confirmation_mode": "flag", "security_analyzer": "text"},
    "condenser": {
        "attention_window": "whole",
        "keep_first": "whole",
        "llm_config": "text",
        "max_event_length": "whole",
        "max_events": "whole",
        "max_size": "whole",
        "type": "text",
    },
    "mcp": {"shttp_servers": "servers", "sse_servers": "servers", "stdio_servers": "servers"},
    "model_routing": {"router_name": "text"},
}
"""By section, with the kind of each value."""
FILE_ONLY = ("condenser", "mcp", "model_routing")
"""Sections that no variable changes. The variables of the others start with the section; those of `core` do not."""

LLM_KEYS = frozenset(
    {
        *("api_key", "api_version", "aws_access_key_id", "aws_region_name", "aws_secret_access_key", "base_url"),
        *("caching_prompt", "completion_kwargs", "custom_llm_provider", "disable_stop_word", "disable_vision"),
        *("drop_params", "input_cost_per_token", "max_input_tokens", "max_message_chars", "max_output_tokens", "model"),
        *("modify_params", "native_tool_calling", "num_retries", "ollama_base_url", "openrouter_app_name"),
        *("openrouter_site_url", "output_cost_per_token", "reasoning_effort", "retry_max_wait", "retry_min_wait"),
        *("retry_multiplier", "safety_settings", "seed", "temperature", "timeout", "top_k", "top_p"),
    }
)
"""Keys of `[llm]`: they become settings of the controller worker, which checks their values."""
ZERO_IS_UNSET = frozenset({"max_input_tokens", "max_output_tokens", "timeout"})
"""Keys of `[llm]` whose value 0 means the default, as in OpenHands' template."""

WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    "core": {
        "cache_dir": "nothing is cached there",
        "cli_multiline_input": "no user types here",
        "client_wait_timeout": "there is no client to wait for",
        "conversation_max_age_seconds": "the files of a run stay until you remove them",
        "debug": "set DECKHANDS_DEBUG=1",
        "file_store": "the log is always kept, see DECKHANDS_HOME",
        "file_store_path": "the log is kept in DECKHANDS_HOME",
        "file_uploads_allowed_extensions": "no file is uploaded",
        "file_uploads_max_file_size_mb": "no file is uploaded",
        "file_uploads_restrict_file_types": "no file is uploaded",
        "jwt_secret": "there are no sessions to sign",
        "max_concurrent_conversations": "a run is one conversation",
        "mcp_host": "there is no server to reach",
        "run_as_openhands": "a sandbox maps users by itself",
        "save_screenshots_in_trajectory": "a trajectory has no screenshots",
        "workspace_mount_path": "the workspace has the same path inside and outside",
        "workspace_mount_path_in_sandbox": "the workspace has the same path inside and outside",
        "workspace_mount_rewrite": "the workspace has the same path inside and outside",
    },
    "agent": {
        "enable_llm_editor": "there is no editor that asks a model",
        "memory_enabled": "there is no such memory",
        "memory_max_threads": "there is no such memory",
        "use_orchestrator": "every agent runs under the one control plane",
    },
    "llm": {
        "correct_num": "there is no editor that asks a model",
        "custom_tokenizer": "tokens are estimated without one",
        "for_routing": "a router names its profiles",
        "log_completions": "replies are in the log, prompts are never stored",
        "log_completions_folder": "replies are in the log, prompts are never stored",
    },
    "sandbox": {
        "close_delay": "a workspace ends with its run",
        "enable_auto_lint": "the editor does not lint",
        "force_rebuild_runtime": "no image is built",
        "initialize_plugins": "there are no plug-ins to start",
        "keep_runtime_alive": "a workspace ends with its run",
        "local_runtime_url": "the workspace is on this machine",
        "pause_closed_runtimes": "a workspace ends with its run",
        "platform": "no image is built",
        "remote_runtime_api_timeout": "the workspace is on this machine",
        "rm_all_containers": "a workspace ends with its run",
        "runtime_extra_build_args": "no image is built",
        "timeout": "the agent names the time-out of a command",
        "user_id": "a sandbox maps users by itself",
        "vscode_port": "there is no VS Code in a workspace",
    },
    "security": {"enable_security_analyzer": "confirmation_mode decides whether risks count"},
    "condenser": {},
    "mcp": {},
    "model_routing": {},
}
"""Keys without effect here, with the reason."""

SECTIONS_WITHOUT_EFFECT: Mapping[str, str] = {
    "extended": "there are no extensions that read it",
    "kubernetes": "a run starts its workers on this machine",
}
"""Sections without effect here, with the reason."""

UNSUPPORTED_KEYS: Mapping[str, Mapping[str, str]] = {
    "core": {
        "replay_trajectory_path": "Import the trajectory: `deckhands import FILE`, then `deckhands replay ID`.",
        "search_api_key": "Offer a search tool by an MCP server, in the section [mcp].",
    },
    "agent": {
        "classpath": "Register the agent as a plug-in, see docs/adding-things.md.",
        "cli_mode": "Use `deckhands run` at a terminal.",
        "condenser": "Write the section [condenser].",
        "model_routing": "Write the section [model_routing].",
        "system_prompt_filename": "Put the instructions into AGENTS.md in the workspace.",
    },
    "sandbox": {
        "additional_networks": "Use the sandbox of DECKHANDS_SANDBOX.",
        "browsergym_eval_env": "There is no BrowserGym here.",
        "cuda_visible_devices": "Use a node with the label gpu, see docs/workspaces.md.",
        "docker_runtime_kwargs": "Set DECKHANDS_DOCKER_CPUS and DECKHANDS_WORKSPACE_MEMORY_BYTES.",
        "enable_gpu": "Use a node with the label gpu, see docs/workspaces.md.",
        "runtime_extra_deps": "Put it into .openhands/setup.sh in the workspace.",
        "selected_repo": "Clone the repository into the workspace first.",
        "trusted_dirs": "Name the workspace with -d.",
        "volumes": "Name the workspace with -d; nothing else is mounted.",
    },
    "security": {},
    "llm": {},
    "condenser": {"trigger_word": "The type agentcache does not exist; use llm."},
    "mcp": {},
    "model_routing": {"llms_for_routing": "Write the section [llm.secondary_model] with for_routing = true."},
}
"""Keys that would change the run unless they are empty or false, with the alternative."""
