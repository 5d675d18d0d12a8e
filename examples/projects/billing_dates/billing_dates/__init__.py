"""Billing dates of subscriptions."""
