"""Tasks in the forms that users and programs write: texts, requests as JSON, directories and addresses to work in.

Start with: spec.
"""
