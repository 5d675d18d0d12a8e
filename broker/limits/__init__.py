"""What all workers may use together: quotas of providers, budgets, batches of model calls.

May import: coordination, log, runtime, specs, store.
Start with: governor.
"""
