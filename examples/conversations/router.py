"""A router looks like one model and chooses another for each call.   python router.py PROFILES

PROFILES is a TOML file, see docs/models.md. It has a profile `auto` with a router.
"""

import sys

from deckhands import Conversation

with Conversation(model="auto", environment={"LLM_CONFIG": sys.argv[1]}) as conversation:
    print(conversation.run("Look around").message)
    print(*conversation.metrics().per_model())
