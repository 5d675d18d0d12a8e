"""The OpenAPI document of the server: what FastAPI says of the routes, and what it cannot know.

May import: server.
Start with: document.
"""
