"""Tools of one's own: their definition, their offer to controllers, Celery tasks as tools, plug-ins.

Start with: custom_tools.
"""
