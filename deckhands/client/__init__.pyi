from .archive.archive import Archive as Archive, delegates_in as delegates_in
from .archive.catalog import ArchivedConversation as ArchivedConversation, described as described
from .archive.errors import ArchiveConflict as ArchiveConflict, ArchiveUnavailable as ArchiveUnavailable
from .archive.errors import CorruptArchive as CorruptArchive, TooLargeToArchive as TooLargeToArchive
from .archive.place import ArchivePlace as ArchivePlace
from .archive.retention import Retention as Retention, Rule as Rule
from .archived import lend_upload as lend_upload
from .beginning import begin as begin
from .changing import Change as Change
from .client import Client as Client
from .connecting import RunIsOver as RunIsOver, cluster_client as cluster_client
from .connecting import conversation_client as conversation_client, on_cluster as on_cluster
from .connecting import on_conversation as on_conversation, read_events as read_events, read_pages as read_pages
from .connecting import read_summary as read_summary, read_wait_reason as read_wait_reason, store_url as store_url
from .conversation.async_conversation import AsyncConversation as AsyncConversation
from .deleting import delete as delete, is_delegate_of as is_delegate_of
from .errors import IsArchived as IsArchived, IsBeingDeleted as IsBeingDeleted, NoCluster as NoCluster
from .errors import NotSettled as NotSettled, NotStopped as NotStopped
from .forking import Point as Point, copied_events as copied_events, fork_of as fork_of
from .known_agents import check_command_of as check_command_of, require_agent_here as require_agent_here
from .known_agents import require_models as require_models, table_of as table_of
from .many import for_each as for_each
from .named_directory import own_directory as own_directory, refuse_unfit as refuse_unfit
from .named_directory import require_served as require_served, until_anybody_serves as until_anybody_serves
from .reader import with_words as with_words
from .reading.live_area import LiveArea as LiveArea
from .reading.metrics import Metrics as Metrics, MetricsFold as MetricsFold
from .reading.notebook_file import NotebookFile as NotebookFile, notebooks_in as notebooks_in
from .reading.output import EventPrinter as EventPrinter, cost_text as cost_text, note as note
from .reading.output import outliving_reader as outliving_reader, print_json as print_json, shown as shown
from .reading.output import summary_lines as summary_lines, table as table
from .reading.rendering import Renderer as Renderer
from .reading.screen import ScreenRenderer as ScreenRenderer
from .reading.spending import Spending as Spending, spending_of as spending_of
from .reading.status_line import Standing as Standing, short_number as short_number, span as span
from .reading.summary import ExitCode as ExitCode, Summary as Summary, Tally as Tally, summarize as summarize
from .reading.summary import words_in as words_in
from .reading.terminal import ask as ask, clean as clean, clean_line as clean_line, columns_of as columns_of
from .reading.terminal import draw as draw, fitted as fitted, is_coloured as is_coloured, is_redrawn as is_redrawn
from .reading.terminal import print_ascii as print_ascii, print_coloured as print_coloured, print_patch as print_patch
from .reading.terminal import print_text as print_text, redraw as redraw, redraw_lines as redraw_lines
from .reading.terminal import width_of as width_of
from .reasons.chain import why_of as why_of
from .reasons.facts import Facts as Facts
from .reasons.history import history_of as history_of
from .reasons.link import Cause as Cause, Link as Link, Why as Why
from .running_cluster import open_cluster as open_cluster
from .runs.cluster_notices import warn_of_ignored_settings as warn_of_ignored_settings
from .runs.cluster_notices import warn_of_missing_workers as warn_of_missing_workers
from .runs.headless import END_LIMIT_SECONDS as END_LIMIT_SECONDS, PATIENCE_SECONDS as PATIENCE_SECONDS
from .runs.headless import Ending as Ending, Task as Task, Watcher as Watcher, run_on_cluster as run_on_cluster
from .runs.headless import run_privately as run_privately
from .runs.private_cluster import private_cluster as private_cluster
from .runs.records import RunFolder as RunFolder
from .secret_keeping import keep_secrets as keep_secrets
from .steering import answer_to as answer_to, append as append, asked_about as asked_about
from .task_files.results_file import result_of as result_of
from .task_files.submission import Outcome as Outcome, Waiting as Waiting, exit_code_of as exit_code_of
from .task_files.submission import submit as submit, submit_and_wait as submit_and_wait
from .task_files.task_file import Form as Form, TaskFile as TaskFile, TaskLine as TaskLine, opened as opened
from .tasks.images import ADDRESSES as ADDRESSES, DATA as DATA, MAX_IMAGES as MAX_IMAGES, ImageUrl as ImageUrl
from .tasks.images import image_urls_of as image_urls_of
from .tasks.inputs import confirmation_in as confirmation_in, id_in as id_in, labels_in as labels_in
from .tasks.inputs import with_script_here as with_script_here
from .tasks.places import Place as Place, place_in as place_in
from .tasks.spec import MAX_KEY_CHARS as MAX_KEY_CHARS, MAX_SECRETS as MAX_SECRETS, MAX_TITLE as MAX_TITLE
from .tasks.spec import MAX_TOOLS as MAX_TOOLS, UNSAID as UNSAID, TaskSpec as TaskSpec, timing_of as timing_of
from .tasks.tasks import MAX_TASK_CHARS as MAX_TASK_CHARS, check_task as check_task
from .tasks.tasks import conversation_id_of as conversation_id_of, conversation_of_task as conversation_of_task
from .tasks.tasks import output_of as output_of, title_of as title_of
from .transfers.commands import CommandFailed as CommandFailed
from .transfers.files import WorkspaceFiles as WorkspaceFiles
from .transfers.packed_files import TooLarge as TooLarge
from .watcher import UNREADABLE as UNREADABLE, End as End, Until as Until, follow as follow, has_ended as has_ended
