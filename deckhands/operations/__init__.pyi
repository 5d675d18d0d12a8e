from .diagnosis.diagnostics import DEAD_LETTERS as DEAD_LETTERS, FAILING as FAILING, RETENTION as RETENTION
from .diagnosis.diagnostics import Finding as Finding, examine_machine as examine_machine
from .diagnosis.diagnostics import examine_retention as examine_retention, examine_store as examine_store
from .diagnosis.diagnostics import reason_unconfined as reason_unconfined
from .diagnosis.examination import examine_cluster as examine_cluster
from .monitoring.endpoint import PATH as PATH, make_server as make_server, metrics_app as metrics_app
from .monitoring.exposition import CONTENT_TYPE as CONTENT_TYPE, Exposition as Exposition
from .monitoring.queues import Depth as Depth, depths as depths
from .monitoring.quotas import quotas_of as quotas_of
from .monitoring.workers import Worker as Worker, workers as workers
from .schedules.book import Entry as Entry, ScheduleBook as ScheduleBook, ScheduleCheck as ScheduleCheck
from .schedules.schedule import CATCH_UP_SECONDS as CATCH_UP_SECONDS, LABEL as LABEL, NAME_PATTERN as NAME_PATTERN
from .schedules.schedule import Overlap as Overlap, Schedule as Schedule
from .webhooks.book import UnknownWebhook as UnknownWebhook, WebhookBook as WebhookBook, WebhookCheck as WebhookCheck
from .webhooks.sending import address_of as address_of, rules_of as rules_of
from .webhooks.webhook import A2A_STATES as A2A_STATES
from .webhooks.webhook import MAX_CHOSEN as MAX_CHOSEN, MAX_URL_CHARS as MAX_URL_CHARS, SETTLED as SETTLED
from .webhooks.webhook import STATE_CHANGED as STATE_CHANGED, Chosen as Chosen, Delivery as Delivery
from .webhooks.webhook import Webhook as Webhook, checked_choice as checked_choice
