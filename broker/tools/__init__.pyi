from .bash_syntax import parse_bash as parse_bash
from .custom_tools import CustomTool as CustomTool, ToolContext as ToolContext, ToolFailed as ToolFailed
from .custom_tools import ToolRunner as ToolRunner, as_custom_tool as as_custom_tool
from .custom_tools import make_idempotency_key as make_idempotency_key
from .output_schema import check_output_schema as check_output_schema, find_violations as find_violations
from .plugins import entry_points as entry_points
from .tool_failures import SANDBOX as SANDBOX, ReportedFailure as ReportedFailure, ToolFailure as ToolFailure
from .tool_failures import ToolFailures as ToolFailures
from .tool_offers import ToolOffers as ToolOffers
