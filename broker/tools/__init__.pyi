from .bash_syntax import parsed as parsed
from .custom_tools import CustomTool as CustomTool, Runner as Runner, ToolContext as ToolContext
from .custom_tools import ToolFailed as ToolFailed, as_custom_tool as as_custom_tool
from .output_schema import check_output_schema as check_output_schema, problems_of as problems_of
from .plugins import entry_points as entry_points
from .tool_failures import SANDBOX as SANDBOX, Reported as Reported, ToolFailure as ToolFailure
from .tool_failures import ToolFailures as ToolFailures
from .tool_offers import ToolOffers as ToolOffers
