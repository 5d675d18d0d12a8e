from .attempts.catalog import FRESH_SECONDS as FRESH_SECONDS, Catalog as Catalog, Listed as Listed
from .attempts.plan import LABEL as LABEL
from .attempts.record import PROGRESS as PROGRESS
from .attempts.results import OUTCOMES as OUTCOMES, Outcome as Outcome, Row as Row, read_results as read_results
from .attempts.standing import Shown as Shown, Standing as Standing, standing_from as standing_from
from .attempts.statistics import Distribution as Distribution, FailureClass as FailureClass
from .attempts.statistics import comparison_of as comparison_of, distribution_of as distribution_of
from .attempts.statistics import failure_classes_of as failure_classes_of, summary_of as summary_of
from .attempts.steering import MAX_AT_ONCE as MAX_AT_ONCE, Requeue as Requeue, Steering as Steering, Wanted as Wanted
from .attempts.stopping import Until as Until
from .carrying_out import Tuning as Tuning, carry_out as carry_out, show as show
from .critic import MAX_SCORE as MAX_SCORE
from .datasets.dataset import absolute as absolute, read_dataset as read_dataset
from .datasets.docker_images import DOCKER as DOCKER
from .datasets.file_trees import MAX_BYTES as MAX_BYTES, MAX_FILES as MAX_FILES, File as File, packed as packed
from .datasets.file_trees import tree_of as tree_of, without_left_out as without_left_out
from .datasets.instances import SHIPPED as SHIPPED, left_out_of as left_out_of
from .datasets.plugins import installed as installed
from .datasets.repositories import is_safe as is_safe
from .detaching import LOG as LOG, detach as detach, is_driven as is_driven
from .directory import RESULTS as RESULTS, SIBLINGS as SIBLINGS, SUMMARY as SUMMARY, Asked as Asked, ask as ask
from .directory import asked_in as asked_in, write_report as write_report
from .evaluating import ROWS as ROWS, model_here as model_here, repositories_here as repositories_here
from .evaluation import AGENTS_FAULT as AGENTS_FAULT, LIMITS as LIMITS
from .exports.atif import atif_of as atif_of
from .exports.dialogue import Dialogue as Dialogue, dialogue_of as dialogue_of
from .exports.inspect_log import inspect_log_of as inspect_log_of, inspect_message as inspect_message
from .exports.predictions import prediction_of as prediction_of
from .exports.sft import sft_of as sft_of
from .reaching import in_store as in_store, named as named
from .redoing import check_redo as check_redo, redo_option as redo_option
from .siblings import Scoring as Scoring, asked_of as asked_of, compared as compared
