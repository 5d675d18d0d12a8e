"""The steps before a model call starts. Their order is in `controller_worker/loop/call_in_flight.py`.

Start with: pending_call.
"""
