"""Takes actions from streams, runs each once, appends observations; identity and limits of the node.

Start with: consumer.
"""
