"""The ingress: tasks arrive by Celery messages and by the inbox stream; outcomes leave as results and replies.

Start with: service.
"""
