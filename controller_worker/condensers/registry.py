"""From a specification to the condenser that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from broker.contract.specs import CondenserPipelineSpec, CondenserSpec
from controller_worker.condensers.amortized import AmortizedForgettingCondenser
from controller_worker.condensers.condenser import Condenser
from controller_worker.condensers.conversation_window import ConversationWindowCondenser
from controller_worker.condensers.llm_attention import LLMAttentionCondenser
from controller_worker.condensers.llm_summarizing import LLMSummarizingCondenser
from controller_worker.condensers.masking import BrowserOutputCondenser, ObservationMaskingCondenser
from controller_worker.condensers.noop import NoOpCondenser
from controller_worker.condensers.pipeline import CondenserPipeline
from controller_worker.condensers.recent_events import RecentEventsCondenser
from controller_worker.condensers.structured_summary import StructuredSummaryCondenser

CONDENSERS: Mapping[str, Callable[[Any], Condenser]] = {
    "noop": NoOpCondenser,
    "observation_masking": ObservationMaskingCondenser,
    "browser_output_masking": BrowserOutputCondenser,
    "recent": RecentEventsCondenser,
    "amortized": AmortizedForgettingCondenser,
    "llm": LLMSummarizingCondenser,
    "llm_attention": LLMAttentionCondenser,
    "structured": StructuredSummaryCondenser,
    "conversation_window": ConversationWindowCondenser,
}
"""By the specification's type; pipelines apart."""


def create_condenser(spec: CondenserSpec) -> Condenser:
    """Make the condenser a specification describes."""
    if isinstance(spec, CondenserPipelineSpec):
        return CondenserPipeline([create_condenser(part) for part in spec.condensers])
    return CONDENSERS[getattr(spec, "type")](spec)  # noqa: B009  (each type of specification has one)
