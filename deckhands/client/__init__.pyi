from .archive.archive import Archive as Archive, find_delegates as find_delegates
from .archive.archive import ArchivedConversation as ArchivedConversation, describe_all as describe_all
from .archive.storage import ArchiveConflict as ArchiveConflict, ArchiveUnavailable as ArchiveUnavailable
from .archive.storage import CorruptArchive as CorruptArchive, TooLargeToArchive as TooLargeToArchive
from .archive.storage import ArchiveStorage as ArchiveStorage
from .archive.retention import Retention as Retention, RetentionRule as RetentionRule
from .archive_operations import lend_upload as lend_upload, load_binary as load_binary
from .starting import OFFERS_LIMIT_SECONDS as OFFERS_LIMIT_SECONDS, find_runnable_agent as find_runnable_agent
from .starting import start_conversation as start_conversation
from .changing import Change as Change, check_note as check_note
from .client import Client as Client
from .connecting import RunIsOver as RunIsOver, cluster_client as cluster_client
from .connecting import conversation_client as conversation_client, conversation_reader as conversation_reader
from .connecting import on_cluster as on_cluster
from .connecting import on_conversation as on_conversation, read_events as read_events, read_pages as read_pages
from .connecting import read_summary as read_summary, read_wait_reason as read_wait_reason, store_url as store_url
from .remote.server_calls import ServerCalls as ServerCalls
from .conversation.async_conversation import AsyncConversation as AsyncConversation
from .deleting import QUESTION_LABELS as QUESTION_LABELS, QUESTION_PREFIX as QUESTION_PREFIX, delete as delete
from .deleting import delete_left_questions as delete_left_questions, is_delegate_of as is_delegate_of
from .errors import IsArchived as IsArchived, IsBeingDeleted as IsBeingDeleted, NoCluster as NoCluster
from .errors import NotSettled as NotSettled, NotStopped as NotStopped
from .forking import ForkPoint as ForkPoint, build_fork as build_fork, copy_events as copy_events
from .starting import is_hold as is_hold, make_hold as make_hold
from .known_agents import RecentOffers as RecentOffers, check_acp_command as check_acp_command
from .known_agents import list_local_agents as list_local_agents
from .known_agents import find_unpriced_models as find_unpriced_models, parse_offers as parse_offers
from .known_agents import require_local_agent as require_local_agent, require_models as require_models
from .many import for_each as for_each
from .named_directory import check_directory as check_directory, require_served as require_served
from .named_directory import resolve_local_directory as resolve_local_directory
from .named_directory import wait_for_tool_worker as wait_for_tool_worker
from .reader import load_quoted_texts as load_quoted_texts
from .reading.status_line import LiveArea as LiveArea
from .reading.metrics import Metrics as Metrics, MetricsFold as MetricsFold
from .reading.notebook_file import NotebookFile as NotebookFile, list_notebooks as list_notebooks
from .reading.output import EventPrinter as EventPrinter, render_summary as render_summary
from .reading.terminal import format_time as format_time, ignore_closed_output as ignore_closed_output, note as note
from .reading.terminal import print_json as print_json, render_cost as render_cost, render_table as render_table
from .reading.rendering import Renderer as Renderer
from .reading.screen import ScreenRenderer as ScreenRenderer
from .reading.metrics import Spending as Spending, compute_spending as compute_spending
from .reading.status_line import StatusLine as StatusLine, format_duration as format_duration
from .reading.status_line import format_short_number as format_short_number
from .reading.prompt import PromptFailed as PromptFailed, make_prompt as make_prompt
from .reading.summary import ExitCode as ExitCode, Summary as Summary, Tally as Tally
from .reading.summary import find_quoted_texts as find_quoted_texts, render_state as render_state
from .reading.summary import summarize as summarize
from .reading.terminal import ask as ask, clean as clean, clean_line as clean_line, count_columns as count_columns
from .reading.terminal import draw as draw, fit_width as fit_width, is_coloured as is_coloured, is_redrawn as is_redrawn
from .reading.terminal import measure_width as measure_width, print_ascii as print_ascii
from .reading.terminal import print_coloured as print_coloured, print_patch as print_patch, print_text as print_text
from .reading.terminal import redraw as redraw, redraw_lines as redraw_lines
from .reasons.chain import explain as explain
from .reasons.facts import ConversationFacts as ConversationFacts
from .reasons.history import fold_history as fold_history
from .reasons.history import Stopped as Stopped
from .reasons.link import Cause as Cause, Link as Link, Why as Why
from .verification import Verification as Verification, verify_file as verify_file, verify_log as verify_log
from .connecting import open_cluster as open_cluster
from .runs.private_cluster import warn_of_ignored_settings as warn_of_ignored_settings
from .runs.private_cluster import warn_of_missing_workers as warn_of_missing_workers
from .runs.headless import END_LIMIT_SECONDS as END_LIMIT_SECONDS, PATIENCE_SECONDS as PATIENCE_SECONDS
from .runs.headless import Ending as Ending, RunCallbacks as RunCallbacks, Task as Task
from .runs.headless import run_on_cluster as run_on_cluster, run_privately as run_privately
from .runs.private_cluster import private_cluster as private_cluster
from .runs.records import RunFolder as RunFolder
from .conversation_secrets import store_secrets as store_secrets
from .steering import append_as_producer as append_as_producer, build_answer as build_answer
from .steering import find_pending_confirmation as find_pending_confirmation
from .task_files.submission import render_result as render_result
from .task_files.submission import AdmissionWaiter as AdmissionWaiter, BatchOutcome as BatchOutcome
from .task_files.submission import combine_exit_codes as combine_exit_codes, submit as submit
from .task_files.submission import submit_and_wait as submit_and_wait
from .task_files.task_file import Form as Form, TaskFile as TaskFile, TaskLine as TaskLine
from .task_files.task_file import open_task_file as open_task_file
from .tasks.tasks import ADDRESSES as ADDRESSES, DATA as DATA, MAX_IMAGES as MAX_IMAGES, ImageUrl as ImageUrl
from .tasks.tasks import to_image_urls as to_image_urls
from .tasks.inputs import resolve_script_path as resolve_script_path, to_confirmation_policy as to_confirmation_policy
from .tasks.inputs import to_conversation_id as to_conversation_id, to_labels as to_labels
from .tasks.tasks import WorkspaceInput as WorkspaceInput, parse_workspace as parse_workspace
from .tasks.spec import MAX_KEY_CHARS as MAX_KEY_CHARS, MAX_SECRETS as MAX_SECRETS, MAX_TITLE as MAX_TITLE
from .tasks.spec import MAX_TOOLS as MAX_TOOLS, UNNAMED_TASK as UNNAMED_TASK, TaskFields as TaskFields
from .tasks.spec import TaskSpec as TaskSpec
from .tasks.spec import parse_timing as parse_timing
from .tasks.tasks import MAX_TASK_CHARS as MAX_TASK_CHARS, check_task as check_task
from .tasks.tasks import derive_conversation_id as derive_conversation_id
from .tasks.tasks import derive_task_conversation_id as derive_task_conversation_id, derive_title as derive_title
from .tasks.tasks import to_output_spec as to_output_spec
from .text_search import FoundConversation as FoundConversation, SearchPage as SearchPage
from .text_search import SearchQuery as SearchQuery, TextMatch as TextMatch, TextSearch as TextSearch
from .trajectories import Segment as Segment, SegmentReply as SegmentReply, Trajectory as Trajectory
from .transfers.commands import CommandFailed as CommandFailed, CommandResult as CommandResult
from .transfers.files import WorkspaceFiles as WorkspaceFiles
from .transfers.packed_files import TooLarge as TooLarge
from .watcher import UNREADABLE as UNREADABLE, End as End, Until as Until, follow as follow, has_ended as has_ended
