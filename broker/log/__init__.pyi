from .append_call import check_admission as check_admission, find_creation as find_creation
from .append_call import STARTS_WORK as STARTS_WORK, Appended as Appended, Closed as Closed, Condition as Condition
from .append_call import Conflict as Conflict, Duplicate as Duplicate, Fenced as Fenced, has_appended as has_appended
from .append_call import make_message_condition as make_message_condition
from .blobs import check_blobs as check_blobs, list_binary as list_binary
from .conversations import ConversationProgress as ConversationProgress, ConversationRow as ConversationRow
from .conversations import Conversations as Conversations, Takeover as Takeover
from .deletion import RELEASE_LIMIT_SECONDS as RELEASE_LIMIT_SECONDS, Deletion as Deletion, NotDeleted as NotDeleted
from .ended_stream import EndedStream as EndedStream
from .entries import find_latest_event as find_latest_event, find_reader as find_reader, parse_entry as parse_entry
from .event_log import EventLog as EventLog, MaskedEvents as MaskedEvents
from .deletion import expire as expire
from .entries import parse_exported_event as parse_exported_event, parse_lines as parse_lines
from .entries import render_event_line as render_event_line
from .follower import check_event_exists as check_event_exists
from .invariants import Violation as Violation, count_duplicate_observations as count_duplicate_observations
from .invariants import count_lost_events as count_lost_events, find_violations as find_violations
from .live_text import LivePiece as LivePiece, LiveText as LiveText
from .log_reader import EntryPage as EntryPage, LogReader as LogReader
from .lost_tails import record_gap as record_gap, record_snapshot_gap as record_snapshot_gap
from .lost_tails import record_reported_gap as record_reported_gap, tail_recording_gaps as tail_recording_gaps
from .selection import SCHEDULED as SCHEDULED, WAITING as WAITING, ConversationQuery as ConversationQuery
from .selection import IndexPosition as IndexPosition, Selection as Selection, is_any_of as is_any_of
from .specification import LogViolation as LogViolation, check_log as check_log
from .status import ANSWERS as ANSWERS, REQUESTABLE_STATES as REQUESTABLE_STATES, Status as Status
from .status import EXPIRED_CODE as EXPIRED_CODE, NOT_STARTED as NOT_STARTED
from .status import find_copied_ids as find_copied_ids, find_latest_model as find_latest_model
from .status import fold_status as fold_status, make_changed_fields as make_changed_fields
from .selection import WaitReason as WaitReason
