from .acp import PERMISSION as PERMISSION, PLAN as PLAN, REJECT as REJECT, TURN as TURN, WAIT as WAIT
from .agent import Agent as Agent, is_acp_agent as is_acp_agent, is_sdk_agent as is_sdk_agent
from .agent import should_show_pages as should_show_pages
from .finish_tool import make_finish_tool as make_finish_tool, parse_finish as parse_finish
from .finish_tool import to_turn_events as to_turn_events
from .registry import check_agent as check_agent, create_agent as create_agent, list_agents as list_agents
