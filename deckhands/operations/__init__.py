"""What keeps a cluster running: jobs, schedules, webhooks, metrics, diagnosis.

Start with: jobs/table.
"""
