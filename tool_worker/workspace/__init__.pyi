from .bindings import Bindings as Bindings
from .checkpoints.checkpoint_store import BASES as BASES, Checkpoints as Checkpoints
from .checkpoints.checkpoint_store import StoreCiphers as StoreCiphers
from .checkpoints.checkpointing import NOTHING_SAVED as NOTHING_SAVED, Checkpointing as Checkpointing
from .files.file_tree import FILE as FILE, LINK as LINK, MAX_PATH_BYTES as MAX_PATH_BYTES, SPECIAL_BITS as SPECIAL_BITS
from .files.file_tree import TreeEntry as TreeEntry, TreeLimits as TreeLimits, iter_entries as iter_entries
from .files.file_tree import list_entries as list_entries, measure as measure
from .files.openat2_paths import Directory as Directory
from .files.staging import create_staging as create_staging, remove_staging as remove_staging
from .files.staging import remove_tree as remove_tree
from .files.unpacking import Unpacking as Unpacking
from .launch.egress_gate import EgressGate as EgressGate, proxy_environment as proxy_environment
from .launch.host_plan import GitIdentity as GitIdentity
from .launch.host_connection import HostConnection as HostConnection, HostResult as HostResult
from .launch.host_folder import HostFolder as HostFolder
from .layers import COPY_NOTICES as COPY_NOTICES, KEEP_SECONDS as KEEP_SECONDS, Layers as Layers, attach as attach
from .layers import find_copy_method as find_copy_method
from .launch.session_programs import find_session_programs as find_session_programs
from .named_directories import NamedDirectories as NamedDirectories
from .node_capacity import NodeCapacity as NodeCapacity, retire as retire
from .bindings import check_served_only_here as check_served_only_here
from .bindings import read_or_create_identity as read_or_create_identity
from .open_workspace import OpenWorkspace as OpenWorkspace
from .opening.changes import Changes as Changes, Patch as Patch
from .opening.confined_program import make_proxied_command as make_proxied_command, run_proxy as run_proxy
from .opening.repositories import SandboxedGit as SandboxedGit, choose_git_sandbox as choose_git_sandbox
from .opening.repositories import require_git as require_git
from .opening.repositories import RepositoryRoots as RepositoryRoots
from .opening.skill_credentials import SkillCredential as SkillCredential
from .opening.skill_credentials import read_skill_credentials as read_skill_credentials
from .opening.skill_installer import SkillInstaller as SkillInstaller
from .opening.workspace_opener import WorkspaceOpener as WorkspaceOpener
from .node_capacity import ResourceUsage as ResourceUsage, iter_descendants as iter_descendants
from .node_capacity import measure_usage as measure_usage, read_start_tick as read_start_tick
from .workspaces import Workspaces as Workspaces
