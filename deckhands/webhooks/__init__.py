"""Webhooks: addresses that are told by signed requests what becomes of conversations.

May import: access, server.
Start with: webhook.
"""
