"""Work over several contexts: features that only their checks pass.   python long_work.py scripted/long_work.json"""

import json
import sys

from deckhands import AgentSpec, Conversation, LLMSpec

agent = AgentSpec(name="LongWorkAgent", enable_condensation_request=True, llm=LLMSpec(model=sys.argv[1]))
with Conversation(agent) as conversation:
    outcome = conversation.run("Write greet.sh: a greeting, by name, and in German")
    print(outcome.message)
    for event in conversation.events():
        if event.kind == "observation.feature_list":
            print(event.sentence)
    for feature in json.loads(conversation.files.read(".deckhands/features.json")):
        print(feature["id"], "passes" if feature["passes"] else "fails", "by", feature["check"])
