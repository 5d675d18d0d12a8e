"""Jobs: periodic and longer work as Celery tasks `deckhands.jobs.*`, and the beat that sends the periodic ones.

May import: archive, client, reading, schedules, tasks, webhooks.
Start with: table.
"""
