from .bwrap import WRAPPER_COMMAND as WRAPPER_COMMAND, BubblewrapSandbox as BubblewrapSandbox
from .choice import AUTO as AUTO, BUILT_IN as BUILT_IN, CHOSEN_BY_NAME as CHOSEN_BY_NAME
from .choice import find_capabilities as find_capabilities
from .choice import find_sandbox as find_sandbox, make_sandboxes as make_sandboxes
from .sandbox import Capabilities as Capabilities
from .control_groups import ControlGroups as ControlGroups, GroupLimits as GroupLimits
from .containers import CODE_ROOT as CODE_ROOT, ClusterAccess as ClusterAccess, ContainerSettings as ContainerSettings
from .containers import KubernetesSettings as KubernetesSettings, is_image_name as is_image_name
from .docker import DockerSandbox as DockerSandbox
from .kubernetes.pods import KubernetesSandbox as KubernetesSandbox
from .egress.proxy import EgressProxy as EgressProxy, EgressRules as EgressRules
from .egress import CONTROL_FD as CONTROL_FD, EGRESS_LISTENER_FD as EGRESS_LISTENER_FD
from .none import NoSandbox as NoSandbox, find_temporary_directory as find_temporary_directory
from .sandbox import DOCUMENT_PACKAGES as DOCUMENT_PACKAGES, find_document_packages as find_document_packages
from .sandbox import HOST_CODE as HOST_CODE, HOST_ID_VARIABLE as HOST_ID_VARIABLE, PACKAGE_ROOT as PACKAGE_ROOT
from .sandbox import SYSTEM_PATH as SYSTEM_PATH, Enclosure as Enclosure, HostDescriptors as HostDescriptors
from .sandbox import ResourceLimits as ResourceLimits, Sandbox as Sandbox, find_interpreter as find_interpreter
from .sandbox import list_interpreter_prefixes as list_interpreter_prefixes
from .seccomp import make_system_call_filter as make_system_call_filter
from .selftest import require_safe as require_safe, run_self_test as run_self_test
from .spawning import bind_for_all as bind_for_all, open_in_memory as open_in_memory, open_private as open_private
from .spawning import spawn as spawn
