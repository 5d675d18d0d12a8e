from .app import TRANSPORT_OPTIONS as TRANSPORT_OPTIONS, make_app as make_app
from .app import make_connection_settings as make_connection_settings
from .bootstep import LoopThread as LoopThread, add_loop as add_loop, cancel_when as cancel_when
from .dispatch import SentTaskState as SentTaskState, TaskSender as TaskSender
from .messages import redis_url as redis_url, split_login as split_login
from .messages import BROKER_ERRORS as BROKER_ERRORS, MAX_DEPTH as MAX_DEPTH, MAX_NAME_CHARS as MAX_NAME_CHARS
from .messages import MessageRefused as MessageRefused
from .messages import WorkerConsumer as WorkerConsumer, check_task as check_task, explain as explain
from .messages import is_deeper as is_deeper, log_dropped as log_dropped
from .taken_entries import SafeConnection as SafeConnection, SafeMessages as SafeMessages
from .taken_entries import SafeTransport as SafeTransport
from .worker_main import CeleryWorker as CeleryWorker, run_worker as run_worker, run_workers as run_workers
