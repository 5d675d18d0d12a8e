"""The permit for one model call: a slot in the quotas and money reserved in the budgets, or a place in a batch.

Start with: call_permit.
"""
