"""What a conversation is made of and what it may do, as frozen values: agents, models, tools, limits, skills, policies.

May import: runtime.
Start with: specs.
"""
