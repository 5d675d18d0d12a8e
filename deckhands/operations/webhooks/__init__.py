"""Webhooks: signed requests that report events of conversations.

Start with: webhook.
"""
