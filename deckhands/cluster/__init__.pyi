from .embedded_cluster import ANY_MODEL as ANY_MODEL, MODULES as MODULES, Cluster as Cluster, ClusterSpec as ClusterSpec
from .embedded_cluster import ClusterWorker as ClusterWorker, Notice as Notice
from .home import TASK as TASK, Example as Example, load_examples as load_examples
from .home import AlreadySupervised as AlreadySupervised, Home as Home, supervise as supervise
