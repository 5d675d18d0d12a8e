"""Scripts that need no file, by name: `finish`, `say:TEXT`, `bash:N`, `forever`."""

from controller_worker.providers.scripted import Script, ScriptedCall, ScriptedTurn, ScriptedUsage

FOREVER_TURNS = 10_000


def builtin_script(name: str) -> Script:
    """Return a built-in script.

    Args:
        name: `finish` finishes at once; `say:TEXT` says the text and calls nothing; `bash:N` runs N commands, one a
            turn, and finishes; `forever` runs 10,000.

    Raises:
        ValueError: no such script.
    """
    kind, _, argument = name.partition(":")
    match kind:
        case "finish":
            return Script(description="Finish at once.")
        case "say":
            return Script(
                description="Say something.", turns=(ScriptedTurn(text=argument or "Hello."),) * FOREVER_TURNS
            )
        case "bash":
            return _bash(int(argument or "10"))
        case "forever":
            return _bash(FOREVER_TURNS)
    raise ValueError(f"there is no built-in script {name!r}; there are finish, say:TEXT, bash:N, forever")


def _bash(steps: int) -> Script:
    return Script(
        description=f"Run {steps} commands, one a turn, and finish.", turns=tuple(map(_step, range(1, steps + 1)))
    )


def _step(number: int) -> ScriptedTurn:
    call = ScriptedCall(name="execute_bash", arguments={"command": f"echo step {number} >> steps.txt"})
    usage = ScriptedUsage(prompt_tokens=1000 + 100 * number, completion_tokens=50)
    return ScriptedTurn(text=f"Step {number}.", tool_calls=(call,), usage=usage)
