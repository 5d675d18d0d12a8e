"""An agent that hands a part of its task to another one.   python sub_agents.py MODEL HELPERS_MODEL"""

import sys

from deckhands import AgentSpec, Conversation, LLMSpec

helper = AgentSpec(name="CodeActAgent", llm=LLMSpec(model=sys.argv[2]))
chief = AgentSpec(enable_delegation=True, delegates={"helper": helper}, llm=LLMSpec(model=sys.argv[1]))
with Conversation(chief) as conversation:
    outcome = conversation.run("Have the files counted")
    print(outcome.message)
    print("delegates:", len(conversation.metrics().delegates))
