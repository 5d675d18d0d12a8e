"""The same code here and on a cluster.   python local_to_remote.py MODEL [redis://host:6379/0]"""

import sys

from deckhands import Conversation

cluster = sys.argv[2] if len(sys.argv) > 2 else None
with Conversation(model=sys.argv[1], cluster=cluster) as conversation:
    for event in conversation.stream("Say who you are"):
        if event.kind == "action.finish":
            print(event.sentence)
