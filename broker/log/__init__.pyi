from .admission import begun_before as begun_before, check as check
from .append_call import WORK as WORK, Condition as Condition, message_with as message_with
from .append_call import Appended as Appended, Closed as Closed, Conflict as Conflict, Duplicate as Duplicate
from .append_call import Fenced as Fenced, has_appended as has_appended
from .conversations import ConversationRow as ConversationRow, Conversations as Conversations, Progress as Progress
from .conversations import Takeover as Takeover
from .delegates import delegate_conversation as delegate_conversation
from .deletion import RELEASE_LIMIT_SECONDS as RELEASE_LIMIT_SECONDS, Deletion as Deletion, NotDeleted as NotDeleted
from .entries import decoded as decoded, find_latest_event as find_latest_event
from .event_log import EventLog as EventLog, Masked as Masked
from .expiry import EXPIRED_CODE as EXPIRED_CODE, NOT_BEGUN as NOT_BEGUN, expire as expire
from .export import event_from_export as event_from_export, event_line as event_line
from .export import events_from_lines as events_from_lines
from .follower import check_remembered as check_remembered
from .invariants import Violation as Violation, doubled_observations as doubled_observations
from .invariants import lost_events as lost_events, violations as violations
from .live_text import LiveText as LiveText, Piece as Piece
from .lost_tails import followed as followed, name_gap as name_gap, name_snapshot_gap as name_snapshot_gap
from .selection import SCHEDULED as SCHEDULED, WAITING as WAITING, Place as Place, Selected as Selected
from .selection import Selection as Selection, is_in as is_in
from .status import ANSWERS as ANSWERS, REQUESTABLE_STATES as REQUESTABLE_STATES, Status as Status, copies as copies
from .status import model_of as model_of, relisted as relisted, status_of as status_of
from .wait_reasons import WaitReason as WaitReason
