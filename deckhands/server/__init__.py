"""The server: a cluster over HTTP, with OpenAPI, streams of events, and API keys.

May import: access, client, monitoring, openapi, protocols, reading, reasons, schedules, tasks, transfers, web,
webhooks.
Start with: application.
"""
