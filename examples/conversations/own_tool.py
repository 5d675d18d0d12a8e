"""A function of this program as a tool.   python own_tool.py MODEL"""

import sys

from deckhands import Conversation, custom_tool


@custom_tool(outcome="idempotent")
def stock(item: str) -> str:
    """Say how many of an item are in stock."""
    return {"lamp": "4 lamps"}.get(item, "none")


def main() -> None:
    """Ask about the stock; a tool worker imports this module, so nothing of this may run there."""
    with Conversation(model=sys.argv[1], tools=[stock]) as conversation:
        print(conversation.run("Are there lamps?").message)
        print(*(event.content for event in conversation.events() if event.kind == "observation.call_tool"))


if __name__ == "__main__":
    main()
