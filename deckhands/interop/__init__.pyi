from .headless.config_file import VARIABLES as VARIABLES, Config as Config, read_config as read_config
from .headless.contract import MAX_ITERATIONS as MAX_ITERATIONS, MAX_SECONDS as MAX_SECONDS, Contract as Contract
from .headless.contract import HeadlessExit as HeadlessExit, experiment_id as experiment_id
from .headless.inside import PathDenied as PathDenied, Inside as Inside, locate as locate
from .headless.permitted_folders import DENIED_PATHS as DENIED_PATHS, DeniedChanges as DeniedChanges
from .headless.permitted_folders import Fingerprints as Fingerprints, PermittedFolders as PermittedFolders
from .headless.sdk_choice import with_sdk_choice as with_sdk_choice
from .headless.worker_files import WorkerFiles as WorkerFiles, to_condenser as to_condenser
from .openhands.exported_log import read_exported_log as read_exported_log
from .openhands.sdk_conversation import read_sdk_directory as read_sdk_directory
from .openhands.sdk_events import SdkTranslation as SdkTranslation, to_sdk_events as to_sdk_events
from .openhands.sdk_events import to_sdk_conversation_id as to_sdk_conversation_id
from .openhands.sdk_export import to_sdk_directory_name as to_sdk_directory_name, to_sdk_files as to_sdk_files
from .openhands.sdk_ids import from_uuid as from_uuid, to_uuid as to_uuid, unpack_id as unpack_id
from .openhands.sdk_events import announce_pause as announce_pause
from .openhands.sdk_state import SdkConversation as SdkConversation, SdkPlace as SdkPlace
from .openhands.sdk_state import to_sdk_agent as to_sdk_agent, to_sdk_policy as to_sdk_policy
from .openhands.trajectory_export import to_trajectory as to_trajectory
from .openhands.trajectory_import import read_trajectory as read_trajectory
