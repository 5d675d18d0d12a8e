"""Tasks as people and programs write them: texts, requests as JSON, directories and addresses to work in.

Start with: requests.
"""
