from .bindings import Bindings as Bindings
from .checkpoints.checkpoint_store import BASES as BASES, Checkpoints as Checkpoints
from .checkpoints.checkpointing import Checkpointing as Checkpointing
from .files.file_tree import FILE as FILE, LINK as LINK, MAX_PATH_BYTES as MAX_PATH_BYTES
from .files.file_tree import SPECIAL_BITS as SPECIAL_BITS, Entry as Entry, TreeLimits as TreeLimits
from .files.file_tree import entries as entries, listed as listed, measure as measure
from .files.openat2_paths import Directory as Directory
from .files.staging import remove as remove, remove_staging as remove_staging
from .files.unpacking import Unpacking as Unpacking
from .launch.egress_gate import EgressGate as EgressGate, proxy_environment as proxy_environment
from .launch.host_plan import GitIdentity as GitIdentity
from .launch.host_connection import HostResult as HostResult
from .launch.host_folder import HostFolder as HostFolder
from .launch.session_programs import session_programs as session_programs
from .named_directories import NamedDirectories as NamedDirectories
from .node_capacity import NodeCapacity as NodeCapacity, retire as retire
from .node_identity import identity_of as identity_of, only_here as only_here
from .open_workspace import OpenWorkspace as OpenWorkspace
from .opening.changes import Changes as Changes, Patch as Patch
from .opening.program_egress import proxied_command as proxied_command, proxy_for as proxy_for
from .opening.repositories import Repositories as Repositories, require_git as require_git
from .opening.repositories import sandbox_of_git as sandbox_of_git
from .opening.repository_roots import RepositoryRoots as RepositoryRoots
from .opening.workspace_opener import WorkspaceOpener as WorkspaceOpener
from .resource_usage import ResourceUsage as ResourceUsage, descendants as descendants, start_tick as start_tick
from .resource_usage import workspace_usage as workspace_usage
from .workspaces import Workspaces as Workspaces
