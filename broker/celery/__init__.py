"""Celery's configuration, the bootstep that runs our loop in a Celery worker, and tasks sent to other applications.

Start with: app.
"""
