from .mcp.launch import SandboxedLaunch as SandboxedLaunch
from .mcp.servers import McpServers as McpServers
from .mcp.task_servers import TaskServers as TaskServers
from .offered import OfferedTools as OfferedTools, load_tools as load_tools, run_in_own_thread as run_in_own_thread
from .registry import find_tool as find_tool
from .remote_work import CallProgress as CallProgress
from .remote_work import FreeSlot as FreeSlot, RemoteContext as RemoteContext, RemoteWork as RemoteWork
from .tool import HostRequest as HostRequest, Tool as Tool, make_replacement as make_replacement, to_answer as to_answer
