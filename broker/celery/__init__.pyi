from .app import make_app as make_app
from .bootstep import LoopThread as LoopThread, add_loop as add_loop, cancel_when as cancel_when
from .dispatch import TaskSender as TaskSender, TaskState as TaskState
from .door_app import BEGINS as BEGINS, CONCURRENCY as CONCURRENCY, EXPIRES as EXPIRES, LIMITS as LIMITS
from .door_app import QUEUE as QUEUE, REFUSED as REFUSED, DoorRequest as DoorRequest, make_door_app as make_door_app
from .door_results import HARD_LIMIT as HARD_LIMIT, KEPT as KEPT, RETRIED as RETRIED, RUN as RUN
from .door_results import SOFT_LIMIT as SOFT_LIMIT, TIME_LIMITS as TIME_LIMITS, TaskResults as TaskResults
from .door_results import is_temporary as is_temporary, revoked as revoked
from .jobs_app import JOBS_CONCURRENCY as JOBS_CONCURRENCY, JOBS_PREFIX as JOBS_PREFIX, JOBS_QUEUE as JOBS_QUEUE
from .jobs_app import JobRequest as JobRequest, make_jobs_app as make_jobs_app, redis_url as redis_url
from .jobs_app import run_beat as run_beat
from .messages import MAX_DEPTH as MAX_DEPTH, is_deeper as is_deeper
from .worker_main import run_worker as run_worker
