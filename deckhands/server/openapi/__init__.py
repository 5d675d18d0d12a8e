"""The OpenAPI document of the server: FastAPI's document, completed with scopes, problems and examples.

Start with: document.
"""
