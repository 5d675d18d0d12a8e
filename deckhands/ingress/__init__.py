"""The door: work comes in by Celery tasks and by the inbox stream, and its outcome goes out to who waits for it.

May import: attempts, client, datasets, evaluation, reading, tasks.
Start with: service.
"""
