"""Confirmation with an own policy; install this folder first.   python ask_first.py MODEL"""

import sys

from deckhands import ConfirmationPolicy, Conversation

policy = ConfirmationPolicy(mode="deployments", settings={"words": ["deploy"]})
with Conversation(model=sys.argv[1], confirmation=policy) as conversation:
    conversation.send_message("Test and deploy it")
    while (outcome := conversation.wait()).state == "awaiting_user_confirmation":
        action = conversation.events()[outcome.asked_id - 1]
        print("asked about:", action.command)
        conversation.reject(reason="Not on a Friday.")
    print(outcome.message)
