"""The OpenAPI document of the server: what FastAPI says of the routes, and what it cannot know.

Start with: document.
"""
