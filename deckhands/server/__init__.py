"""The server: a cluster over HTTP, with OpenAPI, streams of events, and API keys.

Start with: application.
"""
