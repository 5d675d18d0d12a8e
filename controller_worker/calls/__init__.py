"""One model call: the question, the permit, the attempt with its fallbacks, the answer as events.

May import: agents, backends, concerns, condensers, core, llm, memory, messages, security, wrappers.
Start with: model_call.
"""
