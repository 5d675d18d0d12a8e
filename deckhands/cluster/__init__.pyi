from .embedded_cluster import ANY_MODEL as ANY_MODEL, MODULES as MODULES, Cluster as Cluster
from .embedded_cluster import ClusterSpec as ClusterSpec, Notice as Notice, Worker as Worker
from .example_projects import TASK as TASK, Example as Example, examples as examples
from .home import Home as Home, Supervised as Supervised, supervising as supervising
