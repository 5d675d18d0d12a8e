"""The clients of a workspace host and their actions in flight."""

from __future__ import annotations

from tool_worker.host import protocol
from tool_worker.host.compiled import socket
from tool_worker.host.loop import BufferedWriter, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tool_worker.host.session_program import SessionCall
    from tool_worker.host.shell.bash_call import BashCall
    from tool_worker.host.shell.bash_session import BashSession


class Client:
    """One attached tool worker."""

    def __init__(self, loop: Loop, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = protocol.Lines()
        self.writer = BufferedWriter(loop, connection.fileno())
        self.is_open = True


class Execution:
    """An action in flight: the requests that wait for its result, and the session that runs it.

    Attributes:
        call: The shell call of a command; None if a session program runs the action.
        waiting: Pairs of a client and its request number; each gets the result.
    """

    def __init__(self, action_id: int, fingerprint: str, call: BashCall | None) -> None:
        self.action_id = action_id
        self.fingerprint = fingerprint
        self.call = call
        self.session: BashSession | SessionCall | None = None
        self.waiting: list[tuple[Client, object]] = []
