from .acp import PERMISSION as PERMISSION, PLAN as PLAN, REJECT as REJECT, TURN as TURN, WAIT as WAIT
from .agent import Agent as Agent, is_acp_agent as is_acp_agent, is_sdk_agent as is_sdk_agent
from .agent import sees_pages as sees_pages
from .finish_tool import handed_in as handed_in, turn_of as turn_of
from .registry import check_agent as check_agent, create_agent as create_agent, known_agents as known_agents
