"""The right to make one model call: its turn in the quotas, money reserved in the budgets, or a batch.

May import: concerns, core, llm, messages, wrappers.
Start with: call_permit.
"""
