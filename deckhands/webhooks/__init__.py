"""Webhooks: signed requests that report what happens in conversations.

May import: access, server.
Start with: webhook.
"""
