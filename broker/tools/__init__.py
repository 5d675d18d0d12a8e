"""Tools of one's own: their definition, their offer to controllers, Celery tasks as tools, plug-ins.

May import: celery, contract, coordination, runtime, specs, store.
Start with: custom_tools.
"""
