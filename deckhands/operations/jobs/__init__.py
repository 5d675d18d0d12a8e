"""Jobs: periodic and longer work as Celery tasks `deckhands.jobs.*`, and the beat that sends the periodic ones.

Start with: table.
"""
