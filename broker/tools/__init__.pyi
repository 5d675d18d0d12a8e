from .bash_syntax import parse_bash as parse_bash
from .custom_tools import CustomTool as CustomTool, ToolContext as ToolContext, ToolFailed as ToolFailed
from .custom_tools import ToolRunner as ToolRunner, as_custom_tool as as_custom_tool
from .custom_tools import import_tool as import_tool, make_idempotency_key as make_idempotency_key
from .custom_tools import refuse_while_importing as refuse_while_importing
from .mcp_config import KEY_FIELD as KEY_FIELD, McpServerSpec as McpServerSpec, OAuthSpec as OAuthSpec
from .mcp_config import AllowedServers as AllowedServers, is_allowed_address as is_allowed_address
from .mcp_config import read_allowed as read_allowed, read_servers as read_servers
from .mcp_login import ANSWER_SECONDS as ANSWER_SECONDS, LoginNeeded as LoginNeeded, McpTokens as McpTokens
from .mcp_login import is_allowed as is_allowed, log_in as log_in
from .mcp_login import make_auth as make_auth, make_login_needed as make_login_needed, require_login as require_login
from .output_schema import check_output_schema as check_output_schema, find_violations as find_violations
from .plugins import entry_points as entry_points
from .tool_offers import SANDBOX as SANDBOX, ReportedFailure as ReportedFailure, ToolFailure as ToolFailure
from .tool_offers import ToolFailures as ToolFailures
from .tool_offers import ToolOffers as ToolOffers, check_limits as check_limits, to_one_line as to_one_line
