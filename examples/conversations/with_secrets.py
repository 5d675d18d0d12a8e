"""A secret that commands may use and nobody may read.   python with_secrets.py MODEL"""

import sys

from deckhands import Conversation

with Conversation(model=sys.argv[1], secrets={"API_TOKEN": "tip-top-secret-9"}) as conversation:
    print(conversation.run("Use the token").message)
    print(*(event.content for event in conversation.events() if event.kind == "observation.run"))
