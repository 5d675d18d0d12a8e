"""What containers of an engine and pods of a cluster share: the operator's settings, names of images, and their user.

Holds: a container runs as the owner of its workspace, who is not root.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tool_worker.errors import WorkspaceRefused
from tool_worker.sandbox.sandbox import Enclosure

CODE_ROOT = "/run/deckhands"
HOME = "/home/agent"
HOST_NAME = "workspace"
ROOT_SUBSTITUTE_UID = 1000
"""The owner of directories created while running as root."""

_PART = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9a-fA-F:]+\])"
_IMAGE_NAME = re.compile(
    rf"(?:{_HOST}(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha(?:256:[0-9a-f]{{64}}|512:[0-9a-f]{{128}}))?"
)
"""Follows the engine's grammar of image references."""
_NAME_LIMIT = 255


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How the API server of a Kubernetes cluster is reached.

    Attributes:
        config: a kubeconfig file; empty for the service account of this pod.
        address: `https://HOST:PORT` of the API server for the service account; empty outside of a cluster.
        account: directory of the service account's token, certificate authority and namespace.
    """

    config: str = ""
    address: str = ""
    account: str = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """The operator's settings for pods.

    Attributes:
        pod: name of the pod that this worker runs in.
        template: a file with a pod template that our fields complete; empty for none.
        pending_seconds: how long a pod may take to start, the download of its image included.
    """

    access: ClusterAccess = field(default_factory=ClusterAccess)
    pod: str = ""
    template: str = ""
    pending_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """The operator's settings for containers.

    Attributes:
        images: patterns of allowed images; the first one is the default image.
        engine: address of the engine, `unix://…`; empty: the default one.
        cpus: the number of CPUs that a container may use; None for all.
        kubernetes: the settings of pods.
    """

    images: tuple[str, ...] = ()
    engine: str = ""
    cpus: float | None = None
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)

    def find_image_problem(self) -> str | None:
        """Return why the default image cannot be used; None if it can."""
        if not self.images:
            return "no image is named (DECKHANDS_DOCKER_IMAGES)"
        image = self.images[0]
        if not is_image_name(image):
            return f"the first of DECKHANDS_DOCKER_IMAGES must be the name of an image; {image!r} is not"
        return None

    def choose_image(self, image: str) -> str:
        """Return the image to use.

        Raises:
            WorkspaceRefused: the requested image is not allowed.
        """
        image = image or next(iter(self.images), "")
        if image and not is_image_name(image):
            raise WorkspaceRefused(f"{image!r} is not the name of an image.", remedy="Write one such as team/build:7.")
        if image in self.images[:1] or any(fnmatchcase(image, pattern) for pattern in self.images):
            return image
        raise WorkspaceRefused(
            f"This node runs no container of the image {image!r}.", remedy="Ask for one of DECKHANDS_DOCKER_IMAGES."
        )


def is_image_name(text: str) -> bool:
    """Return whether the engine would take this for the name of an image, rather than for an option."""
    return len(text) <= _NAME_LIMIT and _IMAGE_NAME.fullmatch(text) is not None


def find_owner(enclosure: Enclosure) -> tuple[int, int]:
    """Return the user that a container runs as: the owner of its directory.

    A directory of ours first gets another owner.
    """
    directory = enclosure.workspace
    found = directory.stat()
    if found.st_uid != 0:
        return found.st_uid, found.st_gid
    if not enclosure.is_own:
        raise WorkspaceRefused(
            f"{directory} belongs to root, and no program in a container may run as root.",
            remedy="Give it to another user.",
        )
    change_owner(directory, ROOT_SUBSTITUTE_UID, ROOT_SUBSTITUTE_UID)
    return ROOT_SUBSTITUTE_UID, ROOT_SUBSTITUTE_UID


def change_owner(directory: Path, user: int, group: int) -> None:
    """Give a directory of ours and its content to a user, unless that user owns it."""
    found = directory.stat()
    if (found.st_uid, found.st_gid) == (user, group) or os.geteuid() != 0:
        return
    # the top last, because its owner marks the change as complete
    for folder, folders, files in os.walk(directory, topdown=False):
        for name in (*folders, *files):  # folders include links to folders
            os.chown(Path(folder, name), user, group, follow_symlinks=False)
        os.chown(folder, user, group, follow_symlinks=False)
