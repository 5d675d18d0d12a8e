from .spec import RolloutSpec as RolloutSpec, read_rows as read_rows
from .run import Group as Group, Rollout as Rollout, RolloutRun as RolloutRun, find_directory as find_directory
from .remote import NEXT_HEADER as NEXT_HEADER, RemoteRolloutRun as RemoteRolloutRun
from .driver import drive_all as drive_all
from .record import MAX_VERSION as MAX_VERSION, RunRecord as RunRecord, RunState as RunState, list_runs as list_runs
from .record import describe_runs as describe_runs
from .exports import COLUMNS as COLUMNS, Format as Format, export_rollouts as export_rollouts
from .trl import get_reward as get_reward, make_rollout_function as make_rollout_function
from .engines import EngineFailed as EngineFailed
from .stub_engine import StubEngine as StubEngine, serve_stub as serve_stub
