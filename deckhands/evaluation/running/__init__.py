"""An evaluation while it runs: which attempt begins when, what people want of it meanwhile, and how it stands.

May import: cli, client, cluster, monitoring, reading, tasks.
Start with: driver.
"""
