"""The shortest program: a task, and what the agent says.   python minimal.py MODEL"""

import sys

from deckhands import Conversation

with Conversation(model=sys.argv[1]) as conversation:
    print(conversation.run("Write the first ten primes into primes.txt").message)
    print(conversation.files.read("primes.txt").decode(), end="")
