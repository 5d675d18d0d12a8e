"""The steps before a model call starts, outermost first in `controller_worker/loop/call_in_flight.py`.

Start with: pending_call.
"""
