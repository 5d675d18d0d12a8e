from .bwrap import WRAPPER_COMMAND as WRAPPER_COMMAND, BubblewrapSandbox as BubblewrapSandbox
from .choice import AUTO as AUTO, CAPABILITIES as CAPABILITIES, named_sandbox as named_sandbox, sandboxes as sandboxes
from .control_groups import ControlGroups as ControlGroups, GroupLimits as GroupLimits
from .docker import Containers as Containers, DockerSandbox as DockerSandbox, is_image_name as is_image_name
from .egress import CONTROL_FD as CONTROL_FD, EGRESS_LISTENER_FD as EGRESS_LISTENER_FD
from .none import NoSandbox as NoSandbox, temporary_directory as temporary_directory
from .sandbox import HOST_CODE as HOST_CODE, HOST_ID_VARIABLE as HOST_ID_VARIABLE, PACKAGE_ROOT as PACKAGE_ROOT
from .sandbox import SYSTEM_PATH as SYSTEM_PATH, Enclosure as Enclosure, HostDescriptors as HostDescriptors
from .sandbox import ResourceLimits as ResourceLimits, Sandbox as Sandbox, interpreter as interpreter
from .sandbox import interpreter_prefixes as interpreter_prefixes
from .seccomp import system_call_filter as system_call_filter
from .selftest import require_safe as require_safe, run_self_test as run_self_test
from .spawning import bind_for_all as bind_for_all, in_memory as in_memory, opened as opened, spawn as spawn
