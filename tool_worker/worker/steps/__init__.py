"""The middleware that an action passes through, in the order given in `tool_worker/worker/executor.py`.

Start with: action_run.
"""
