"""Tasks as people and programs write them: texts, requests as JSON, directories and addresses to work in.

May import: nothing of this package.
Start with: requests.
"""
