"""Jobs: periodic and longer work as Celery tasks `deckhands.jobs.*`, and the beat that sends the periodic ones.

May import: archive, client, reading, schedules.
Start with: table.
"""
