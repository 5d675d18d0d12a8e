"""Which tool carries out which kind of action."""

from __future__ import annotations

from collections.abc import Mapping

from tool_worker.tools.bash import RunCommand
from tool_worker.tools.browser import ActInBrowser, OpenPage
from tool_worker.tools.code_search import SearchCode
from tool_worker.tools.file_tools import EditFile, ReadFile, WriteFile
from tool_worker.tools.ipython import RunCell
from tool_worker.tools.survey import SurveyWorkspace
from tool_worker.tools.tool import Tool

TOOLS: Mapping[str, Tool] = {
    "action.run": RunCommand(),
    "action.read": ReadFile(),
    "action.edit": EditFile(),
    "action.write": WriteFile(),
    "action.search_code": SearchCode(),
    "action.survey": SurveyWorkspace(),
    "action.run_ipython": RunCell(),
    "action.browse": OpenPage(),
    "action.browse_interactive": ActInBrowser(),
}
"""By the action's kind."""
