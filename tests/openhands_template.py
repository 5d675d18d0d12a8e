"""The keys and values of OpenHands' `config.template.toml` (V0), without its comments on them."""

TEMPLATE = """
[core]
#workspace_base = "./workspace"
#cache_dir = "/tmp/cache"
#debug = false
#disable_color = false
#save_trajectory_path="./trajectories"
#save_screenshots_in_trajectory = false
#replay_trajectory_path = ""
#file_store_path = "/tmp/file_store"
#file_store = "memory"
#file_uploads_max_file_size_mb = 0
#enable_browser = true
#max_budget_per_task = 0.0
#max_iterations = 500
#workspace_mount_path_in_sandbox = "/workspace"
#workspace_mount_path = ""
#workspace_mount_rewrite = ""
#run_as_openhands = true
#runtime = "docker"
#default_agent = "CodeActAgent"
#jwt_secret = ""
#file_uploads_restrict_file_types = false
#file_uploads_allowed_extensions = [".*"]
#enable_default_condenser = true
#max_concurrent_conversations = 3
#conversation_max_age_seconds = 864000  # 10 days

[llm]
#aws_access_key_id = ""
#aws_region_name = ""
#aws_secret_access_key = ""
api_key = ""
#base_url = ""
#api_version = ""
#reasoning_effort = "medium"
#input_cost_per_token = 0.0
#output_cost_per_token = 0.0
#custom_llm_provider = ""
#max_message_chars = 10000
#max_input_tokens = 0
#max_output_tokens = 0
model = "claude-sonnet-4-5-20250929"
#num_retries = 8
#retry_max_wait = 120
#retry_min_wait = 15
#retry_multiplier = 2.0
#drop_params = false
#modify_params = true
#caching_prompt = true
#ollama_base_url = ""
#temperature = 0.0
#timeout = 0
#top_p = 1.0
#disable_vision = true
#custom_tokenizer = ""
#safety_settings = []

[llm.draft_editor]
correct_num = 5

[llm.gpt4o-mini]
api_key = ""
model = "gpt-4o"

#[llm.secondary_model]
#model = "kimi-k2"
#api_key = ""
#for_routing = true
#max_input_tokens = 128000

[agent]
enable_browsing = true
enable_llm_editor = false
enable_editor = true
enable_jupyter = true
enable_cmd = true
enable_think = true
enable_finish = true
#llm_config = 'gpt4o-mini'
#enable_prompt_extensions = true
#disabled_microagents = []
enable_history_truncation = true
enable_condensation_request = false

[agent.RepoExplorerAgent]
llm_config = 'gpt3'

[agent.CustomAgent]
classpath = "my_package.my_module.MyCustomAgent"

[sandbox]
#timeout = 120
#user_id = 1000
#base_container_image = "nikolaik/python-nodejs:python3.12-nodejs22"
#use_host_network = false
#runtime_extra_build_args = ["--network=host", "--add-host=host.docker.internal:host-gateway"]
#enable_auto_lint = false
#initialize_plugins = true
#runtime_extra_deps = ""
#runtime_startup_env_vars = {}
#browsergym_eval_env = ""
#platform = ""
#force_rebuild_runtime = false
#runtime_container_image = ""
#keep_runtime_alive = false
#pause_closed_runtimes = false
#close_delay = 300
#rm_all_containers = false
#enable_gpu = false
#cuda_visible_devices = ''
#docker_runtime_kwargs = {}
#vscode_port = 41234

[security]
#confirmation_mode = false
#security_analyzer = "llm"
#enable_security_analyzer = true

[condenser]
type = "noop"

#[llm.condenser]
#model = "gpt-4o"
#temperature = 0.1
#max_input_tokens = 1024

[kubernetes]
#namespace = "default"
#ingress_domain = "localhost"
#pvc_storage_size = "2Gi"
#pvc_storage_class = "standard"
#resource_cpu_request = "1"
#resource_memory_request = "1Gi"
#resource_memory_limit = "2Gi"
#image_pull_secret = ""
#ingress_tls_secret = ""
#node_selector_key = ""
#node_selector_val = ""
#tolerations_yaml = ""
#privileged = false

[mcp]
#sse_servers = ["http://localhost:8080/mcp/sse", {url = "https://api.example.com/mcp/sse", api_key = "your-api-key"}]
#shttp_servers = ["https://api.example.com/mcp/a", {url = "https://api.example.com/mcp/b", api_key = "k", timeout = 180}]
#stdio_servers = [{name = "fetch", command = "uvx", args = ["mcp-server-fetch"], env = {DEBUG = "true"}}]

[model_routing]
#router_name = "noop_router"
"""


def uncomment(template: str = TEMPLATE) -> str:
    return "\n".join(line.removeprefix("#") for line in template.splitlines())
