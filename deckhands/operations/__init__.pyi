from .diagnosis.dead_letters import DeadConversation as DeadConversation, describe_death as describe_death
from .diagnosis.dead_letters import find_dead_conversations as find_dead_conversations
from .diagnosis.diagnostics import DEAD_LETTERS as DEAD_LETTERS, FAILING as FAILING, RETENTION as RETENTION
from .diagnosis.diagnostics import Finding as Finding, examine_machine as examine_machine
from .diagnosis.diagnostics import examine_packages as examine_packages
from .diagnosis.diagnostics import examine_retention as examine_retention, examine_store as examine_store
from .diagnosis.diagnostics import find_sandbox_fault as find_sandbox_fault
from .diagnosis.examination import examine_cluster as examine_cluster
from .jobs.celery_app import JOBS_WORKER as JOBS_WORKER, run_beat_until as run_beat_until
from .monitoring.endpoint import PATH as PATH, make_server as make_server, metrics_app as metrics_app
from .monitoring.exposition import CONTENT_TYPE as CONTENT_TYPE, Exposition as Exposition
from .monitoring.history import DAY as DAY, HOUR as HOUR, ClusterSample as ClusterSample, History as History
from .monitoring.queues import Depth as Depth, read_depths as read_depths
from .monitoring.quotas import read_quotas as read_quotas
from .monitoring.census import WorkerMetrics as WorkerMetrics, read_workers as read_workers
from .schedules.repository import ScheduleCheck as ScheduleCheck, ScheduleConflict as ScheduleConflict
from .schedules.repository import ScheduleRepository as ScheduleRepository
from .schedules.repository import StoredSchedule as StoredSchedule
from .schedules.schedule import CATCH_UP_SECONDS as CATCH_UP_SECONDS, LABEL as LABEL, NAME_PATTERN as NAME_PATTERN
from .schedules.schedule import Overlap as Overlap, Schedule as Schedule
from .webhooks.repository import UnknownWebhook as UnknownWebhook, WebhookCheck as WebhookCheck
from .webhooks.repository import WebhookRepository as WebhookRepository
from .webhooks.sending import parse_networks as parse_networks, resolve_address as resolve_address
from .webhooks.webhook import A2A_STATES as A2A_STATES, MAX_CHOSEN as MAX_CHOSEN, MAX_URL_CHARS as MAX_URL_CHARS
from .webhooks.webhook import SETTLED as SETTLED, STATE_CHANGED as STATE_CHANGED, Chosen as Chosen, Delivery as Delivery
from .webhooks.webhook import Webhook as Webhook, check_choice as check_choice
