"""The steps that an action passes through, outermost first in `tool_worker/worker/executor.py`.

Start with: action_run.
"""
