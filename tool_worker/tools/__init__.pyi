from .mcp.config import McpServerSpec as McpServerSpec, read_servers as read_servers
from .mcp.launch import SandboxedLaunch as SandboxedLaunch
from .mcp.servers import McpServers as McpServers
from .offered import OfferedTools as OfferedTools, found_tools as found_tools
from .registry import tool_for as tool_for
from .tool import HostRequest as HostRequest, Tool as Tool, answering as answering, instead_of as instead_of
