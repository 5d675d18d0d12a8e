"""What all workers may use together: quotas of providers, budgets, batches of model calls.

Start with: governor.
"""
