from .ingress_app import INGRESS_WORKER as INGRESS_WORKER
from .waiting_tasks import complete_tasks as complete_tasks
