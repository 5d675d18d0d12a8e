from .app import TRANSPORT_OPTIONS as TRANSPORT_OPTIONS, make_app as make_app
from .bootstep import LoopThread as LoopThread, add_loop as add_loop, cancel_when as cancel_when
from .dispatch import TaskSender as TaskSender, TaskState as TaskState
from .logins import redis_url as redis_url, split_login as split_login
from .messages import MAX_DEPTH as MAX_DEPTH, MAX_NAME_CHARS as MAX_NAME_CHARS, Refused as Refused
from .messages import WorkerConsumer as WorkerConsumer, check_task as check_task, explain as explain
from .messages import is_deeper as is_deeper, note_dropped as note_dropped
from .taken_entries import KeptConnection as KeptConnection, KeptMessages as KeptMessages
from .taken_entries import KeptTransport as KeptTransport
from .worker_main import run_worker as run_worker
