from .waiting_tasks import complete_tasks as complete_tasks
