"""The right to make one model call: its turn in the quotas, money reserved in the budgets, or a batch.

Start with: call_permit.
"""
