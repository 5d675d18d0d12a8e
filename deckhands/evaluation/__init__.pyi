from .attempts.catalog import FRESH_SECONDS as FRESH_SECONDS, Catalog as Catalog, EvaluationListing as EvaluationListing
from .attempts.driver import ModelSilent as ModelSilent
from .attempts.plan import LABEL as LABEL, Attempt as Attempt, EvaluationPlan as EvaluationPlan
from .attempts.record import PROGRESS as PROGRESS
from .attempts.results import OUTCOMES as OUTCOMES, AttemptRow as AttemptRow, Outcome as Outcome
from .attempts.results import Results as Results, ResultsInUse as ResultsInUse, read_results as read_results
from .attempts.status import AttemptDetails as AttemptDetails, EvaluationStatus as EvaluationStatus
from .attempts.status import parse_status as parse_status
from .attempts.statistics import Distribution as Distribution, FailureClass as FailureClass
from .attempts.statistics import classify_failures as classify_failures, compare_runs as compare_runs
from .attempts.statistics import compute_distribution as compute_distribution, compute_summary as compute_summary
from .attempts.statistics import format_mean as format_mean, get_reward as get_reward
from .attempts.steering import MAX_AT_ONCE as MAX_AT_ONCE, EvaluationSteering as EvaluationSteering, Requeue as Requeue
from .attempts.steering import AttemptKey as AttemptKey, StoredSteering as StoredSteering
from .attempts.stopping import StoppingCriterion as StoppingCriterion
from .runner import Tuning as Tuning, print_summary as print_summary, run_evaluation as run_evaluation
from .critic import MAX_SCORE as MAX_SCORE
from .datasets.dataset import read_dataset as read_dataset, read_defaults as read_defaults
from .datasets.dataset import to_absolute_name as to_absolute_name
from .datasets.docker_images import DOCKER as DOCKER
from .datasets.file_trees import MAX_BYTES as MAX_BYTES, MAX_FILES as MAX_FILES, TreeFile as TreeFile
from .datasets.file_trees import pack_tree as pack_tree, read_tree as read_tree, split_left_out as split_left_out
from .datasets.instances import SHIPPED as SHIPPED, Instance as Instance, list_left_out as list_left_out
from .datasets.instances import select_instances as select_instances
from .datasets.dataset import list_installed as list_installed
from .datasets.own_rows import OwnRow as OwnRow
from .datasets.repositories import ArchiveFiles as ArchiveFiles, CommitFiles as CommitFiles, is_safe as is_safe
from .datasets.repositories import run_git as run_git
from .detached_runs import LOG as LOG, detach as detach, is_driven as is_driven
from .detached_runs import start_in_background as start_in_background
from .directory import RESULTS as RESULTS, SIBLINGS as SIBLINGS, SUMMARY as SUMMARY
from .directory import EvaluationRequest as EvaluationRequest, load_request as load_request
from .directory import record_request as record_request, write_report as write_report
from .evaluating import ROWS as ROWS, resolve_model as resolve_model, resolve_repositories as resolve_repositories
from .evaluation import AGENT_FAULT_CODES as AGENT_FAULT_CODES, LIMITS as LIMITS, Evaluation as Evaluation
from .evaluation import CHECK as CHECK, derive_attempt_id as derive_attempt_id
from .exports.atif import to_atif as to_atif
from .exports.conversation import export_conversation as export_conversation
from .exports.dialogue import Dialogue as Dialogue, to_dialogue as to_dialogue
from .exports.inspect_log import to_inspect_log as to_inspect_log, to_inspect_message as to_inspect_message
from .exports.conversation import to_prediction as to_prediction
from .exports.sft import to_sft as to_sft
from .store_access import find_evaluation as find_evaluation, run_in_store as run_in_store
from .detached_runs import check_redo as check_redo, redo_option as redo_option
from .rewards import Rewards as Rewards
from .scorers import AttemptToScore as AttemptToScore, load_scorers as load_scorers
from .scorers import to_absolute_scorer as to_absolute_scorer
from .siblings import Scoring as Scoring, build_request as build_request, compare_siblings as compare_siblings
