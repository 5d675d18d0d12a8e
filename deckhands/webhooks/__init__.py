"""Webhooks: addresses that learn by signed requests what becomes of conversations.

May import: access, server.
Start with: webhook.
"""
