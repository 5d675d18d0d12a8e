"""Webhooks: signed requests that report what happens in conversations.

May import: access, openapi, server.
Start with: webhook.
"""
