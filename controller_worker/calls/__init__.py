"""One model call: the question, the attempt with its fallbacks, the answer as events.

May import: agents, backends, concerns, condensers, core, llm, memory, messages, permits, security, wrappers.
Start with: call_under_way.
"""
