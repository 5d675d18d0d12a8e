"""The tool `bash`: applies calls to the persistent shell and writes their results for the model.

States, limits and most of the wording follow OpenHands' BashSession (0.62), without a terminal multiplexer and without
polling.

Holds: each call is answered exactly once, whatever happens to the shell. The shell survives a command that timed out,
and the next call can wait for that command, send it input or interrupt it.
Does not: run two commands at once.
"""

# Differs: TERM is dumb and escape sequences are removed, because the reader is a model and not a screen.
# Differs: output between two commands, and the rest of a command that ended after its call was answered, come with the
#   next result; OpenHands loses them.
# Differs: long output is cut to its head and tail, because errors appear at both ends; OpenHands keeps the last 10,000
#   lines.
# Differs: if a command ends the shell, the result has its exit code, and a new shell starts in the same directory;
#   OpenHands hangs.
# Differs: leading blanks of the output are kept, because they are output; OpenHands strips them.

from __future__ import annotations

import os
import pwd

from tool_worker.host.children import Children
from tool_worker.host.configuration import HostConfiguration
from tool_worker.host.loop import EventLoop
from tool_worker.host.shell.bash_call import BashCall
from tool_worker.host.shell.command_marks import CommandEnd
from tool_worker.host.shell.output_buffer import LONG_OUTPUT_BYTES
from tool_worker.host.shell.saved_state import make_capture_command, take_capture
from tool_worker.host.shell.shell import ENDED, IDLE, INPUT_LINE_LIMIT_BYTES, STARTED, SUBMITTED, Shell, ShellEvents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CANCEL_STEPS_SECONDS = (0.2, 0.5)
"""When a cancelled command gets a second SIGINT, because bash loses one between two programs; and when it is killed."""

COMPLETED = "completed"
NO_CHANGE_TIMEOUT = "no_change_timeout"
HARD_TIMEOUT = "hard_timeout"
RUNNING = "running"
CANCELLED = "cancelled"
REFUSED = "refused"

KILLED = 128 + 9
MEMORY_WORDS = (
    # bash pads the word with blanks, or ends the line after it
    "Killed  ",
    "Killed\n",
    "MemoryError",
    "Cannot allocate memory",
    "bad_alloc",
    "JavaScript heap out of memory",
)
MEMORY_WORDS_CHARS = 4000

NOTHING_TO_READ = "ERROR: No previous running command to retrieve logs from."
NOTHING_TO_TYPE_FOR = "ERROR: No previous running command to interact with."
BELOW = "[Below is the output of the previous command.]\n"
UNRESPONSIVE = (
    "\n[The shell stopped responding and was killed. Something that was done to it keeps it from reading commands or "
    "from reporting their end (a function named `builtin`, a trap, PROMPT_COMMAND or a prompt that waits, a closed "
    "descriptor). {outcome} The next command gets a new shell in {directory}; the variables of this one are lost.]"
)
UNRESPONSIVE_OUTCOMES = {
    SUBMITTED: "This command was probably not run.",
    STARTED: "How this command ended is unknown.",
}
NEXT_STEPS = (
    'You may wait longer to see additional output by sending empty command \'\', send text or keys ("C-c", "C-d", '
    '"C-z") to the running program with `is_input` set to true, or give a longer `timeout` with your next commands.'
)

RESTORED = (
    "[This conversation is a fork. Its files are those of the original{when}, and so are the shell's directory, "
    "exported variables, functions and aliases. Changes by users and background programs since then are not in them. "
    "The home and /tmp are empty, and no program runs.]\n"
)

IN_BACKGROUND = (
    "\n[The command runs in the background. An empty command with this `terminal` shows what is new, with `timeout` it "
    "waits for the end; `control` `kill` ends it.]"
)

Result = dict[str, object]


class BashSession:
    """The shell of a conversation, and the call in progress, if any."""

    def __init__(
        self, loop: EventLoop, children: Children, configuration: HostConfiguration, *, cwd: str | None = None
    ) -> None:
        self._loop = loop
        self._children = children
        self._configuration = configuration
        self._working_dir = cwd or configuration.workspace
        self._events = ShellEvents(on_output=self._on_output, on_end=self._on_command_end, on_exit=self._on_shell_exit)
        self._call: BashCall | None = None
        self._finish: Callable[[Result], None] | None = None
        self._username = _username()
        self._began_at = 0.0
        self._changed_at = 0.0
        self._is_cancelled = False
        self._cancelled_at = 0.0
        self._unobserved: tuple[str, str, int, dict[str, object]] | None = None
        self._notice = ""
        self._is_continued = False
        self._command = ""
        self._limits = loop.timer(self._check_limits)
        self._escalation = loop.timer(self._escalate)
        self._shell = self._new_shell()

    @property
    def is_busy(self) -> bool:
        """Whether a call is in progress."""
        return self._finish is not None

    @property
    def working_dir(self) -> str:
        """The shell's directory after the latest command."""
        return self._working_dir

    @property
    def has_running_command(self) -> bool:
        """Whether a command runs in the shell, including one whose call was answered on a timeout."""
        return self._shell.is_busy

    @property
    def shell_pid(self) -> int:
        """The process id of the shell."""
        return self._shell.pid

    def announce_new_shell(self) -> None:
        """Add a notice to the next result: the state of an earlier shell is lost."""
        self._notice = (
            f"[The previous shell has ended, and this is a new one in {self._working_dir}. Lost: shell variables and "
            "functions, the current directory, other terminals and all programs that were running"
            f"{self._configuration.lost}. Kept: {self._configuration.kept}.]\n"
        )

    @property
    def is_at_rest(self) -> bool:
        """Whether no command runs, and no end of a command waits to be reported."""
        return not (self.is_busy or self.has_running_command or self.has_unreported_end)

    def restore(self, script: str, event: object) -> None:
        """Restore the state of the shell that `capture` found in another workspace; nothing may have run yet.

        Args:
            event: The event after which that workspace was saved; None or 0 if not known.
        """
        self._shell.prepare(script)
        self._notice = RESTORED.format(when=f" as they were saved after event {event}" if event else "")

    def capture(self, finish: Callable[[str | None], None]) -> None:
        """Pass the script that restores the shell's state to `finish`; None if the shell does not write it.

        The shell must be at rest. The command leaves no trace in it, but traps of the agent see it.
        """
        notice, command, exit_code = self._notice, self._command, self._shell.previous_exit_code
        file = os.path.join(self._configuration.temporary_directory, f".shell-{os.urandom(8).hex()}")
        self._notice = ""

        def end(result: dict[str, object]) -> None:
            # Jobs that ended meanwhile are reported to the next call.
            self._notice = f"{self._notice}{notice}{result['content']}" + ("\n" if result["content"] else "")
            self._command = command
            self._shell.previous_exit_code = exit_code
            finish(take_capture(file))

        save = make_capture_command(self._configuration, file)
        self.start(BashCall(save, no_change_timeout=None, blocking=True), end)

    def start(self, call: BashCall, finish: Callable[[Result], None]) -> None:
        """Start a call; `finish` receives its result, possibly at once. No other call may be in progress."""
        assert self._finish is None
        self._call = call
        self._finish = finish
        now = self._loop.now()
        self._began_at = now
        self._changed_at = now
        self._is_continued = self._shell.is_busy
        if self._is_continued:
            self._continue(call)
        elif self._unobserved is not None and (call.is_input or not call.command):
            self._report_unobserved(call)
        elif call.is_input or not call.command:
            self._answer(REFUSED, text=NOTHING_TO_TYPE_FOR if call.command else NOTHING_TO_READ)
        else:
            self._run(call)

    def interrupt(self) -> bool:
        """Stop the running command: SIGINT, and SIGKILL half a second later. Return whether a command was running."""
        if not self._shell.is_busy:
            return False
        if not self._is_cancelled:
            self._is_cancelled = True
            self._shell.interrupt()
            self._cancelled_at = self._loop.now()
            self._escalation.set(self._cancelled_at + CANCEL_STEPS_SECONDS[0])
        return True

    @property
    def command(self) -> str:
        """The latest command that was started."""
        return self._command

    @property
    def has_unreported_end(self) -> bool:
        """Whether a command has ended whose result was not reported yet."""
        return self._unobserved is not None

    def leave(self) -> None:
        """End the shell without killing its jobs; no call may be in progress."""
        self._drop_timers()
        if self._shell.state != ENDED:
            self._shell.leave()

    def kill(self) -> None:
        """Kill the shell and its command; a call in progress is answered."""
        if self._finish is not None:
            self._answer(CANCELLED, suffix="\n[The terminal was killed.]")
        self.close()

    def close(self) -> None:
        """Kill the shell; a call in progress gets no answer."""
        self._finish = None
        self._drop_timers()
        if self._shell.state != ENDED:
            self._shell.kill()

    def _drop_timers(self) -> None:
        self._loop.drop(self._limits)
        self._loop.drop(self._escalation)

    def _run(self, call: BashCall) -> None:
        if self._shell.state == ENDED:
            try:
                self._shell = self._new_shell()
            except OSError as error:
                self._answer(REFUSED, text=f"ERROR: The shell cannot be started: {error.strerror}.")
                return
        if self._unobserved is not None:
            content, suffix, _, _ = self._unobserved
            self._notice = f"{BELOW}{content}{suffix}\n"
            self._unobserved = None
        self._is_cancelled = False
        self._command = call.command
        command = call.command
        if "<<" in command:
            from tool_worker.host.shell.here_documents import finish_here_documents  # imports the whole of `re`

            command = finish_here_documents(command)
        self._shell.submit(command, environment=call.env, cwd=call.cwd)
        self._arm()

    def _continue(self, call: BashCall) -> None:
        """Apply a call to the running command."""
        if call.command and not call.is_input:
            text = (
                f'\n[Your command "{call.command}" is NOT executed. The previous command is still running - a new '
                f"command can be sent when it has completed. {NEXT_STEPS}]"
            )
            self._answer(REFUSED, suffix=text)
        elif call.key:
            self._shell.press(call.key)
            self._arm()
        elif call.command and not self._shell.type_text(call.command):
            text = f"\n[Your input is NOT sent: the program takes lines of up to {INPUT_LINE_LIMIT_BYTES} bytes.]"
            self._answer(REFUSED, suffix=text)
        else:
            self._arm()

    def _report_unobserved(self, call: BashCall) -> None:
        """Answer with the result of a command that ended between two calls."""
        assert self._unobserved is not None
        content, suffix, omitted_bytes, facts = self._unobserved
        self._unobserved = None
        if call.command:
            suffix += f'\n[Your input "{call.command}" is NOT sent: the command had already completed.]'
        self._deliver(COMPLETED, content, suffix, omitted_bytes, facts)

    def _arm(self) -> None:
        assert self._call is not None
        dues = []
        if self._call.no_change_timeout is not None:
            dues.append(self._changed_at + self._call.no_change_timeout)
        if self._call.timeout is not None:
            dues.append(self._began_at + self._call.timeout)
        self._limits.set(min(dues, default=None))

    def _check_limits(self) -> None:
        assert self._call is not None
        now = self._loop.now()
        silence = self._call.no_change_timeout
        limit = self._call.timeout
        if silence is not None and now >= self._changed_at + silence:
            text = f"\n[The command has no new output after {silence:g} seconds. {NEXT_STEPS}]"
            self._answer(NO_CHANGE_TIMEOUT, suffix=text)
        elif limit is not None and now >= self._began_at + limit and self._call.is_brief:
            self._answer(RUNNING, suffix=IN_BACKGROUND)
        elif limit is not None and now >= self._began_at + limit:
            self._answer(HARD_TIMEOUT, suffix=f"\n[The command timed out after {limit:g} seconds. {NEXT_STEPS}]")
        else:
            self._arm()

    def _on_output(self) -> None:
        self._changed_at = self._loop.now()

    def _on_command_end(self, end: CommandEnd) -> None:
        self._working_dir = end.working_dir
        if self._is_cancelled:
            # An interrupt between fork and wait ends the command, but not the program that bash has just forked.
            self._shell.kill_started()
        facts = {
            "exit_code": end.exit_code,
            "pid": end.background_pid,
            "py_interpreter_path": _python_on(end.search_path),
            **self._location_facts(),
        }
        self._complete(facts, "")

    def _on_shell_exit(self, exit_code: int, last_state: str) -> None:
        if self._shell.is_unresponsive:
            suffix = UNRESPONSIVE.format(outcome=UNRESPONSIVE_OUTCOMES[last_state], directory=self._working_dir)
            self._conclude({"exit_code": exit_code, **self._location_facts()}, suffix)
            return
        gone = f"[The previous shell ended with exit code {exit_code}. This is a new one.]\n"
        if last_state == IDLE:
            self._notice = gone
        elif last_state == SUBMITTED and self._call is not None and self._finish is not None and not self._is_continued:
            # The shell ended just before it received the command. The command has not started and is run again.
            self._notice = gone
            self._run(self._call)
        else:
            note = f"\n[The command also ended the shell. The next command gets a new one in {self._working_dir}.]"
            self._complete({"exit_code": exit_code, **self._location_facts()}, note)

    def _location_facts(self) -> dict[str, object]:
        return {"username": self._username, "hostname": os.uname().nodename, "working_dir": self._working_dir}

    def _complete(self, facts: dict[str, object], note: str) -> None:
        key = self._call.key if self._call is not None and self._finish is not None else None
        sent = f" CTRL+{key} was sent." if key else ""
        suffix = f"\n[The command completed with exit code {facts['exit_code']}.{sent}]"
        self._conclude(facts, suffix + note)

    def _conclude(self, facts: dict[str, object], suffix: str) -> None:
        """Pass the end of the command to the call in progress, or keep it for the next call."""
        self._escalation.set(None)
        if self._is_cancelled:
            suffix += "\n[The command was cancelled.]"
        if self._finish is not None:
            self._answer(CANCELLED if self._is_cancelled else COMPLETED, suffix=suffix, facts=facts)
        else:
            content, omitted_bytes, where = self._take_output(is_final=True)
            self._unobserved = (content.rstrip(), suffix + where, omitted_bytes, facts)

    def _answer(
        self, state: str, *, suffix: str = "", text: str | None = None, facts: dict[str, object] | None = None
    ) -> None:
        """Answer with the output so far, or with `text` instead."""
        content, omitted_bytes, where = (
            (text, 0, "") if text is not None else self._take_output(is_final=facts is not None)
        )
        self._deliver(state, content.rstrip(), suffix + where, omitted_bytes, facts or {})

    def _take_output(self, *, is_final: bool) -> tuple[str, int, str]:
        """Return the new output, the number of omitted bytes, and a note that names the file of a long output."""
        content, omitted_bytes = self._shell.output.take(is_final=is_final)
        where = self._shell.whole_output.note() if omitted_bytes or len(content) > LONG_OUTPUT_BYTES else ""
        if is_final:
            self._shell.whole_output.end()
        return content, omitted_bytes, where

    def _deliver(self, state: str, content: str, suffix: str, omitted_bytes: int, facts: dict[str, object]) -> None:
        finish, self._finish = self._finish, None
        prefix, self._notice = self._notice, ""
        if self._is_continued and not facts:
            prefix = BELOW
        self._limits.set(None)
        assert finish is not None
        memory = self._configuration.memory
        if memory and state == COMPLETED and (facts.get("exit_code") == KILLED or _names_memory(content)):
            suffix += f"\n{memory}"
        # Exit code -1 means that the command is still running.
        metadata = {"exit_code": -1, "pid": -1, **facts, "prefix": prefix, "suffix": suffix}
        finish({"content": content, "state": state, "omitted_bytes": omitted_bytes, "metadata": metadata})

    def _escalate(self) -> None:
        killed_at = self._cancelled_at + CANCEL_STEPS_SECONDS[1]
        if self._loop.now() >= killed_at:
            self._shell.kill()
        else:
            self._shell.interrupt()
            self._escalation.set(killed_at)

    def _new_shell(self) -> Shell:
        return Shell(self._loop, self._children, self._configuration, self._working_dir, self._events)


def _names_memory(content: str) -> bool:
    """Return whether the output ends with an out-of-memory message; the command itself may have succeeded."""
    end = content[-MEMORY_WORDS_CHARS:] + "\n"
    return any(word in end for word in MEMORY_WORDS)


def _username() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _python_on(search_path: str) -> str | None:
    """Return the path of `python`, or of `python3`, which is the only name on some systems."""
    for name in ("python", "python3"):
        for directory in search_path.split(":"):
            candidate = os.path.join(directory, name)
            if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
                return candidate
    return None
