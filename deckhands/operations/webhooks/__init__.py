"""Webhooks: signed requests that report what happens in conversations.

Start with: webhook.
"""
