"""A scripted ACP agent: it follows its prompt, a step a line. Standard library only, so that it runs in sandboxes.

Usage: python3 acp_agent.py [load] [again]; it can load its session, and does its steps again after an interruption.

Each line of a prompt that starts with `!` is a step:

    !say TEXT          !think TEXT        !plan A|B          !call TITLE|COMMAND (runs it)      !edit PATH|TEXT
    !ask TITLE|COMMAND (asks, and runs it if it may)         !write PATH|TEXT, !read PATH, !terminal COMMAND (by us)
    !cost USD          !stop REASON       !error CODE|TEXT   !raw LINE          !exit CODE      !hang      !flood N
    !long BYTES        !env NAME          !ignore-cancel     !stderr TEXT

The agent repeats the rest of a prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

OPTIONS = [
    {"optionId": "yes", "name": "Allow", "kind": "allow_once"},
    {"optionId": "ever", "name": "Always", "kind": "allow_always"},
    {"optionId": "no", "name": "Reject", "kind": "reject_once"},
]


class Agent:
    def __init__(self, habits: list[str]) -> None:
        self.can_load = "load" in habits
        self.repeats = "again" in habits
        self.session = ""
        self.number = 0
        self.calls = 0
        self.waiting: dict[int, tuple[threading.Event, list[dict]]] = {}
        self.is_cancelled = threading.Event()
        self.ignores_cancel = False
        self.lock = threading.Lock()

    def send(self, **message: object) -> None:
        self.raw(json.dumps({"jsonrpc": "2.0", **message}))

    def raw(self, line: str) -> None:
        with self.lock:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def update(self, kind: str, /, **fields: object) -> None:
        self.send(
            method="session/update", params={"sessionId": self.session, "update": {"sessionUpdate": kind, **fields}}
        )

    def ask(self, method: str, **params: object) -> dict:
        self.number += 1
        answered, answers = self.waiting[self.number] = threading.Event(), []
        self.send(id=self.number, method=method, params={"sessionId": self.session, **params})
        answered.wait()
        return answers[0]

    def serve(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "method" not in message:
                answered, answers = self.waiting[message["id"]]
                answers.append(message)
                answered.set()
            elif message["method"] == "session/cancel":
                if not self.ignores_cancel:
                    self.is_cancelled.set()
            else:
                self.answer(message)
        os._exit(0)

    def answer(self, message: dict) -> None:
        method, params, number = message["method"], message["params"], message["id"]
        if method == "initialize":
            about = {"name": "scripted", "version": "1"}
            result = {"protocolVersion": 1, "agentInfo": about, "agentCapabilities": {"loadSession": self.can_load}}
            self.send(id=number, result=result)
        elif method == "session/new":
            self.session = f"session-{os.urandom(4).hex()}"
            self.send(id=number, result={"sessionId": self.session})
        elif method == "session/load":
            self.session = params["sessionId"]
            self.update("agent_message_chunk", content={"type": "text", "text": "REPLAYED"})
            self.send(id=number, result={})
        elif method == "session/prompt":
            self.is_cancelled.clear()
            threading.Thread(target=self.turn, args=(number, params["prompt"][0]["text"]), daemon=True).start()

    def turn(self, number: int, text: str) -> None:
        steps = [line.strip()[1:] for line in text.splitlines() if line.strip().startswith("!")]
        if text.startswith(("You were interrupted", "An earlier session")) and not self.repeats:
            self.say("I continue.")
            steps = []
        elif not steps:
            self.say(f"You said: {text}")
        stop = "end_turn"
        for step in steps:
            if self.is_cancelled.is_set():
                stop = "cancelled"
                break
            name, _, rest = step.partition(" ")
            if name == "stop":
                stop = rest
            elif name == "error":
                code, _, said = rest.partition("|")
                self.send(id=number, error={"code": int(code), "message": said})
                return
            else:
                getattr(self, {"ask": "asked"}.get(name, name.replace("-", "_")))(rest)
        if self.is_cancelled.is_set():
            stop = "cancelled"
        usage = {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}
        self.send(id=number, result={"stopReason": stop, "usage": usage})

    def say(self, text: str) -> None:
        self.update("agent_message_chunk", content={"type": "text", "text": text})

    def think(self, text: str) -> None:
        self.update("agent_thought_chunk", content={"type": "text", "text": text})

    def plan(self, text: str) -> None:
        entries = [{"content": each, "priority": "low", "status": "pending"} for each in text.split("|")]
        self.update("plan", entries=entries)

    def begin(self, title: str, kind: str, **fields: object) -> str:
        self.calls += 1
        call_id = f"call-{self.calls}"
        self.update("tool_call", toolCallId=call_id, title=title, kind=kind, status="pending", **fields)
        return call_id

    def end(self, call_id: str, text: str, status: str = "completed") -> None:
        content = [{"type": "content", "content": {"type": "text", "text": text}}]
        self.update("tool_call_update", toolCallId=call_id, status=status, content=content)

    def run(self, call_id: str, command: str) -> None:
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
        self.end(call_id, done.stdout + done.stderr, "failed" if done.returncode else "completed")

    def call(self, text: str) -> None:
        title, _, command = text.partition("|")
        self.run(self.begin(title, "execute", rawInput={"command": command}), command)

    def edit(self, text: str) -> None:
        path, _, new = text.partition("|")
        call_id = self.begin(f"Edit {path}", "edit", locations=[{"path": path}])
        Path(path).write_text(new)
        diff = {"type": "diff", "path": path, "oldText": None, "newText": new}
        self.update("tool_call_update", toolCallId=call_id, status="completed", content=[diff])

    def asked(self, text: str) -> None:
        title, _, command = text.partition("|")
        call = {"toolCallId": self.begin(title, "execute", rawInput={"command": command})}
        answer = self.ask("session/request_permission", toolCall=call, options=OPTIONS)
        outcome = answer.get("result", {}).get("outcome", {})
        if outcome.get("optionId") == "yes":
            self.run(call["toolCallId"], command)
        else:
            self.end(call["toolCallId"], f"not run: {json.dumps(outcome)}", "failed")

    def write(self, text: str) -> None:
        path, _, content = text.partition("|")
        answer = self.ask("fs/write_text_file", path=path, content=content)
        self.say(f"wrote: {json.dumps(answer.get('error'))} ")

    def read(self, path: str) -> None:
        answer = self.ask("fs/read_text_file", path=path)
        self.say(f"read: {json.dumps(answer.get('result') or answer.get('error'))} ")

    def terminal(self, command: str) -> None:
        created = self.ask("terminal/create", command=command)["result"]["terminalId"]
        call_id = self.begin("Terminal", "execute", content=[{"type": "terminal", "terminalId": created}])
        ended = self.ask("terminal/wait_for_exit", terminalId=created)["result"]
        self.ask("terminal/release", terminalId=created)
        self.update("tool_call_update", toolCallId=call_id, status="completed")
        self.say(f"exit: {ended['exitCode']}")

    def method(self, name: str) -> None:
        self.say(f"answer: {json.dumps(self.ask(name).get('error'))} ")

    def cost(self, text: str) -> None:
        self.update("usage_update", used=1, size=2, cost={"amount": float(text), "currency": "USD"})

    def stderr(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def exit(self, code: str) -> None:
        os._exit(int(code))

    def hang(self, _: str) -> None:
        self.is_cancelled.wait()

    def ignore_cancel(self, _: str) -> None:
        self.ignores_cancel = True

    def flood(self, count: str) -> None:
        for number in range(int(count)):
            self.think(f"{number} ")

    def long(self, size: str) -> None:
        self.raw("x" * int(size))

    def env(self, name: str) -> None:
        self.say(f"{name}={os.environ.get(name)}")

    def sleep(self, seconds: str) -> None:
        self.is_cancelled.wait(float(seconds))

    def tick(self, path: str) -> None:
        """Write into a file for ever, and never say anything."""
        while not self.is_cancelled.is_set():
            with Path(path).open("a") as file:
                file.write("x")
            self.is_cancelled.wait(0.02)


if __name__ == "__main__":
    Agent(sys.argv[1:]).serve()
