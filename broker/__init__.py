"""The lowest layer: everything that two processes must agree on.

Events and their bytes, the log, ownership, parking, limits and the Celery application. Imports nothing of ours.
"""
