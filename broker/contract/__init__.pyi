from . import codec as codec
from .codec import SHORTENED_END_CHARS as SHORTENED_END_CHARS
from .schema_version import SCHEMA_VERSION as SCHEMA_VERSION
from .codec import SHORTEN_ABOVE_BYTES as SHORTEN_ABOVE_BYTES, action_kinds as action_kinds, checksum_of as checksum_of
from .codec import decode_any as decode_any, event_from_wire as event_from_wire, find_kinds as find_kinds
from .codec import pack as pack, to_entry as to_entry
from .actions import WAYS_OUT as WAYS_OUT, AgentDelegateAction as AgentDelegateAction
from .actions import AgentFinishAction as AgentFinishAction, AgentRejectAction as AgentRejectAction
from .actions import AgentThinkAction as AgentThinkAction, ChangeAgentStateAction as ChangeAgentStateAction
from .actions import CmdRunAction as CmdRunAction, CondensationAction as CondensationAction
from .actions import CondensationRequestAction as CondensationRequestAction, LoopRecoveryAction as LoopRecoveryAction
from .actions import asks_for_server as asks_for_server
from .actions import MCPAction as MCPAction, MessageAction as MessageAction, OfferedToolAction as OfferedToolAction
from .actions import RiskyAction as RiskyAction, SystemMessageAction as SystemMessageAction
from .actions import ToolCallAction as ToolCallAction
from .agent_factory import AgentFactoryConfig as AgentFactoryConfig, AgentKind as AgentKind
from .agent_factory import choose_agent as choose_agent, legacy_of as legacy_of, sdk_of as sdk_of
from .agent_files import AGENT_FOLDERS as AGENT_FOLDERS, AgentFile as AgentFile
from .agent_files import load_agent_files as load_agent_files, parse_agent_file as parse_agent_file
from .agent_files import make_agent_file as make_agent_file, read_agent_files as read_agent_files
from .agent_files import render_delegates as render_delegates
from .agent_state import TERMINAL_STATES as TERMINAL_STATES, WAITING_FOR_USER_STATES as WAITING_FOR_USER_STATES
from .agent_state import AgentState as AgentState, is_settled as is_settled
from .allowed_hosts import HostRule as HostRule, parse_authority as parse_authority
from .allowed_hosts import parse_host_rules as parse_host_rules, render_authority as render_authority
from .browser_events import BrowseInteractiveAction as BrowseInteractiveAction, BrowseURLAction as BrowseURLAction
from .browser_events import BrowserOutputObservation as BrowserOutputObservation
from .browser_events import FileDownloadObservation as FileDownloadObservation
from .code_search import EXPLORE_TREE_STRUCTURE as EXPLORE_TREE_STRUCTURE, GET_ENTITY_CONTENTS as GET_ENTITY_CONTENTS
from .code_search import GLOB as GLOB, GREP as GREP, SEARCH_CODE_SNIPPETS as SEARCH_CODE_SNIPPETS
from .code_search import CodeSearchAction as CodeSearchAction, CodeSearchObservation as CodeSearchObservation
from .counted_commands import EFFECTS_FILE as EFFECTS_FILE, CountedEffects as CountedEffects
from .counted_commands import make_counted_command as make_counted_command
from .counted_commands import parse_counted_command as parse_counted_command
from .condenser_specs import DEFAULT_CONDENSER as DEFAULT_CONDENSER
from .condenser_specs import AmortizedForgettingCondenserSpec as AmortizedForgettingCondenserSpec
from .condenser_specs import AnyCondenserSpec as AnyCondenserSpec, AskingCondenserSpec as AskingCondenserSpec
from .condenser_specs import BrowserOutputCondenserSpec as BrowserOutputCondenserSpec
from .condenser_specs import CondenserPipelineSpec as CondenserPipelineSpec, CondenserSpec as CondenserSpec
from .condenser_specs import ConversationWindowCondenserSpec as ConversationWindowCondenserSpec
from .condenser_specs import LLMAttentionCondenserSpec as LLMAttentionCondenserSpec
from .condenser_specs import LLMSummarizingCondenserSpec as LLMSummarizingCondenserSpec
from .condenser_specs import NoOpCondenserSpec as NoOpCondenserSpec
from .condenser_specs import ObservationMaskingCondenserSpec as ObservationMaskingCondenserSpec
from .condenser_specs import RecentEventsCondenserSpec as RecentEventsCondenserSpec
from .condenser_specs import RollingCondenserSpec as RollingCondenserSpec
from .condenser_specs import StructuredSummaryCondenserSpec as StructuredSummaryCondenserSpec
from .condenser_specs import handles_requests as handles_requests
from .error_texts import ERROR_KEYS as ERROR_KEYS, REMEDIES as REMEDIES, find_error_remedy as find_error_remedy
from .error_texts import add_remedy as add_remedy, is_error_key as is_error_key, render_error as render_error
from .delegate_control import DelegatesObservation as DelegatesObservation, DelegateOperation as DelegateOperation
from .delegate_control import ManageDelegatesAction as ManageDelegatesAction
from .double_texting import ROLLED_BACK as ROLLED_BACK, InterruptedObservation as InterruptedObservation
from .double_texting import RolledBackObservation as RolledBackObservation, find_rolled_back as find_rolled_back
from .events import CallEstimate as CallEstimate, ConversationCreated as ConversationCreated
from .events import ConversationStarted as ConversationStarted, DelegateEnded as DelegateEnded
from .events import ModelCallAdmitted as ModelCallAdmitted, ModelCallDeferred as ModelCallDeferred
from .events import ModelCallFailed as ModelCallFailed, ModelReply as ModelReply, ModelSwitched as ModelSwitched
from .events import ModelToolCall as ModelToolCall, ModelUsage as ModelUsage, OperatorActed as OperatorActed
from .events import Parent as Parent, PartyStopped as PartyStopped, TokenUsage as TokenUsage
from .events import SegmentStarted as SegmentStarted
from .fencing import Ownership as Ownership
from .file_events import ApplyPatchAction as ApplyPatchAction, FileEditAction as FileEditAction
from .file_events import FileEditObservation as FileEditObservation, FileEditSource as FileEditSource
from .file_events import FileReadAction as FileReadAction, FileReadObservation as FileReadObservation
from .file_events import FileReadSource as FileReadSource, FileWriteAction as FileWriteAction
from .file_events import FileWriteObservation as FileWriteObservation
from .interventions import DEFAULT_TIMEOUT_SECONDS as DEFAULT_TIMEOUT_SECONDS, MAX_COMMAND_CHARS as MAX_COMMAND_CHARS
from .interventions import MAX_TIMEOUT_SECONDS as MAX_TIMEOUT_SECONDS
from .interventions import CommandExecutedObservation as CommandExecutedObservation
from .interventions import ConfirmationReminder as ConfirmationReminder
from .interventions import ConversationChanged as ConversationChanged, ExecuteCommandAction as ExecuteCommandAction
from .kinds import Action as Action, ActionSecurityRisk as ActionSecurityRisk, BlobRef as BlobRef
from .kinds import ConfirmationStatus as ConfirmationStatus, Event as Event, EventSource as EventSource
from .kinds import EventT as EventT, Observation as Observation, Paragraph as Paragraph, Role as Role
from .kinds import ToolCallMetadata as ToolCallMetadata, WorkspaceUse as WorkspaceUse, share_names as share_names
from .kinds import with_fields as with_fields, with_id as with_id
from .interventions import Labels as Labels, validate_labels as validate_labels
from .llm_spec import LLMSpec as LLMSpec
from .long_work import FEATURES_FILE as FEATURES_FILE, FEATURE_LIST as FEATURE_LIST, INIT_SCRIPT as INIT_SCRIPT
from .long_work import LONG_WORK_AGENT as LONG_WORK_AGENT, MAX_FEATURES as MAX_FEATURES, NOTES_FILE as NOTES_FILE
from .long_work import Feature as Feature, FeatureCheckAction as FeatureCheckAction
from .long_work import FeatureCheckObservation as FeatureCheckObservation, FeatureListAction as FeatureListAction
from .long_work import FeatureListObservation as FeatureListObservation, SaveProgressAction as SaveProgressAction
from .long_work import SaveProgressObservation as SaveProgressObservation, count_passing as count_passing
from .long_work import render_features as render_features, write_features as write_features
from .notes import ID_CHARS as ID_CHARS, MAX_NOTES as MAX_NOTES, MAX_NOTE_CHARS as MAX_NOTE_CHARS, Note as Note
from .notes import NoteAction as NoteAction, NoteObservation as NoteObservation, NotebookKey as NotebookKey
from .notes import note_id_of as note_id_of, recall_notes as recall_notes, render_notes as render_notes
from .notes import sort_notes as sort_notes
from .observations import MAX_COMMAND_OUTPUT_CHARS as MAX_COMMAND_OUTPUT_CHARS, TRUNCATION_MARKER as TRUNCATION_MARKER
from .observations import AgentCondensationObservation as AgentCondensationObservation
from .observations import AgentDelegateObservation as AgentDelegateObservation
from .observations import AgentStateChangedObservation as AgentStateChangedObservation
from .observations import CmdOutputMetadata as CmdOutputMetadata, CmdOutputObservation as CmdOutputObservation
from .observations import ErrorObservation as ErrorObservation, EventsLostObservation as EventsLostObservation
from .observations import FinishRefusedObservation as FinishRefusedObservation
from .observations import FinishVerdictObservation as FinishVerdictObservation
from .observations import LoopDetectionObservation as LoopDetectionObservation, MCPObservation as MCPObservation
from .observations import MCPQuestionObservation as MCPQuestionObservation, ServerQuestion as ServerQuestion
from .observations import NullObservation as NullObservation, OutcomeUnknownObservation as OutcomeUnknownObservation
from .observations import SuccessObservation as SuccessObservation, SurveyObservation as SurveyObservation
from .observations import ToolCallObservation as ToolCallObservation, UserRejectObservation as UserRejectObservation
from .observations import truncate_content as truncate_content
from .llm_spec import OFFERED_MODELS as OFFERED_MODELS, PATTERN_END as PATTERN_END
from .llm_spec import UNPRICED_MODELS as UNPRICED_MODELS
from .llm_spec import SCRIPT_PREFIXES as SCRIPT_PREFIXES, ModelNotOffered as ModelNotOffered
from .llm_spec import ModelTable as ModelTable, OfferedModel as OfferedModel, check_offered as check_offered
from .llm_spec import find_model_names as find_model_names, not_offered_error as not_offered_error
from .plain_json import MAX_JSON_DEPTH as MAX_JSON_DEPTH, replace_surrogates as replace_surrogates
from .plain_json import to_plain_json as to_plain_json
from .policies import ANALYZERS as ANALYZERS, BUILT_IN_ANALYZERS as BUILT_IN_ANALYZERS, BUILT_IN_MODES as BUILT_IN_MODES
from .policies import PLUGIN_NAME as PLUGIN_NAME, POLICIES as POLICIES, STUCK_CODE as STUCK_CODE
from .policies import ConfirmationPolicy as ConfirmationPolicy, LoopPolicy as LoopPolicy, LoopResponse as LoopResponse
from .specs import ACP_AGENT as ACP_AGENT, ACP_PREFIX as ACP_PREFIX, LABEL_PATTERN as LABEL_PATTERN
from .specs import IMAGE_SANDBOXES as IMAGE_SANDBOXES, SANDBOX_PATTERN as SANDBOX_PATTERN
from .specs import NAME_PATTERN as NAME_PATTERN, AcpSpec as AcpSpec, AgentSpec as AgentSpec, CriticSpec as CriticSpec
from .specs import GoalSpec as GoalSpec, Limits as Limits, MemorySpec as MemorySpec, OutputSpec as OutputSpec
from .specs import PlanSpec as PlanSpec, Priority as Priority, PriorityName as PriorityName, SdkSpec as SdkSpec
from .specs import Skill as Skill, Tenancy as Tenancy, WorkspaceNeeds as WorkspaceNeeds, WorkspaceSpec as WorkspaceSpec
from .specs import asks_model as asks_model, priority_of as priority_of
from .recall import AvailableAgent as AvailableAgent, AvailableSkill as AvailableSkill
from .recall import MicroagentKnowledge as MicroagentKnowledge
from .recall import PathRule as PathRule, RecallAction as RecallAction, RecallObservation as RecallObservation
from .recall import RecallType as RecallType
from .session_events import AcpCall as AcpCall, AcpObservation as AcpObservation, AcpPermission as AcpPermission
from .session_events import AcpPermissionAction as AcpPermissionAction, AcpTurnAction as AcpTurnAction
from .session_events import IPythonRunCellAction as IPythonRunCellAction
from .session_events import IPythonRunCellObservation as IPythonRunCellObservation
from .markdown import MAX_FILE_BYTES as MAX_FILE_BYTES, shorten_text as shorten_text
from .skill_sources import ALL_TENANTS as ALL_TENANTS
from .skill_sources import MAX_SKILL_SOURCES as MAX_SKILL_SOURCES, MAX_SOURCE_CHARS as MAX_SOURCE_CHARS
from .skill_sources import SKILL_SOURCE_PATTERN as SKILL_SOURCE_PATTERN, SkillSource as SkillSource
from .skill_sources import SkillSourceRule as SkillSourceRule, check_skill_folder as check_skill_folder
from .skill_sources import find_skill_folders as find_skill_folders, find_skill_name as find_skill_name
from .skill_sources import parse_skill_source as parse_skill_source
from .skills import FILE_MARK as FILE_MARK, HOOK_SCRIPT as HOOK_SCRIPT, INSTRUCTION_FILES as INSTRUCTION_FILES
from .skills import MAX_HEAD_BYTES as MAX_HEAD_BYTES, MAX_SURVEY_BYTES as MAX_SURVEY_BYTES
from .skills import MAX_NESTED_DEPTH as MAX_NESTED_DEPTH, MAX_NESTED_FILES as MAX_NESTED_FILES
from .skills import NESTED_FILES as NESTED_FILES, is_skill_file as is_skill_file, matches_pattern as matches_pattern
from .skills import MAX_SKILLS as MAX_SKILLS, NO_SKILLS as NO_SKILLS
from .skills import SCRIPT_MARK as SCRIPT_MARK, SETUP_SCRIPT as SETUP_SCRIPT, SKILL_FOLDERS as SKILL_FOLDERS
from .skills import SkillFiles as SkillFiles, SkillReader as SkillReader, find_trigger as find_trigger
from .skills import SERVER_FILES as SERVER_FILES, SkillServer as SkillServer
from .skills import parse_surveyed_files as parse_surveyed_files
from .skills import check_skill_file as check_skill_file, load_skills as load_skills, parse_skills as parse_skills
from .skills import read_skill_files as read_skill_files, read_workspace_files as read_workspace_files
from .task_list import PlanAcceptedObservation as PlanAcceptedObservation, PlanAction as PlanAction
from .task_list import TaskItem as TaskItem, TaskTrackingAction as TaskTrackingAction
from .task_list import TaskTrackingObservation as TaskTrackingObservation
from .timing import MAX_SECONDS as MAX_SECONDS, DoubleTexting as DoubleTexting, MessagePolicy as MessagePolicy
from .timing import Moment as Moment, Seconds as Seconds, StartWindow as StartWindow, Timing as Timing
from .tool_arguments import ToolCallError as ToolCallError, parse_json as parse_json, parse_message as parse_message
from .tool_arguments import require_text as require_text
from .tool_specs import MAX_DESCRIPTION_CHARS as MAX_DESCRIPTION_CHARS, MAX_SCHEMA_CHARS as MAX_SCHEMA_CHARS
from .tool_specs import McpAddress as McpAddress, SERVER_NAME_PATTERN as SERVER_NAME_PATTERN
from .tool_specs import OutcomePolicy as OutcomePolicy, ToolOffer as ToolOffer, ToolSpec as ToolSpec
from .workspace_events import DigestWorkspaceAction as DigestWorkspaceAction
from .workspace_events import OpenWorkspaceAction as OpenWorkspaceAction, SurveyAction as SurveyAction
from .workspace_events import WorkspaceDigestObservation as WorkspaceDigestObservation
from .workspace_events import WorkspaceFailedObservation as WorkspaceFailedObservation
from .workspace_events import WorkspaceOpenedObservation as WorkspaceOpenedObservation
from .workspace_sources import GitSource as GitSource, UploadedSource as UploadedSource, find_format as find_format
from .workspace_sources import parse_git_source as parse_git_source
from .token_records import TOKENS_BLOB as TOKENS_BLOB, UNKNOWN_VERSION as UNKNOWN_VERSION
from .token_records import RecordedTokens as RecordedTokens, TokenRecord as TokenRecord, to_runs as to_runs
