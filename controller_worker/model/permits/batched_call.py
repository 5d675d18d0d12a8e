"""One call of one conversation in a batch: added to the queue, and later fetched from it.

Holds: a step is added to one batch only, even under another owner. An interactive user never waits for a batch.
"""

from __future__ import annotations

from typing import Any

from broker.contract import LLMSpec, Priority
from broker.limits import BatchCallStatus, Batches
from controller_worker.core import CallModel
from controller_worker.providers import CallBatched, LLMConfig, ModelRequest, load_reply, make_lane


def is_batched(config: LLMConfig | None, request: ModelRequest, priority: Priority) -> bool:
    """Return whether a call uses the batch API: a step of a conversation without an interactive user."""
    if config is None or config.batch is None:
        return False
    return request.service == "agent" and priority is Priority.BATCH and request.rollout is None


def name_step(call: CallModel) -> str:
    """Return the key of a call within its conversation."""
    return f"{call.iteration}.{call.attempt}"


class BatchedCall:
    """Implements a request's `carry`; see `batching`.

    Attributes:
        seen_id: the last event in the prompt, which may be older than the current question.
    """

    def __init__(
        self,
        batches: Batches,
        conversation_id: str,
        call: CallModel,
        *,
        spec: LLMSpec,
        config: LLMConfig,
        seen_id: int,
    ) -> None:
        self._batches = batches
        self._cid = conversation_id
        self._step = name_step(call)
        self._spec = spec
        self._lane = make_lane(spec, config)
        self.seen_id = seen_id

    async def carry(self, body: bytes) -> Any:
        """Return the provider's answer.

        Raises:
            CallBatched: there is no answer yet; the conversation is woken when it arrives.
            ModelError: the call failed.
        """
        call = await self._batches.load_call(self._cid, self._step)
        if call.status is BatchCallStatus.DONE:
            self.seen_id = call.seen_id
            return load_reply(call.result)
        if call.status is BatchCallStatus.NONE:
            await self._batches.put(
                self._cid,
                self._step,
                seen_id=self.seen_id,
                lane=self._lane,
                about_lane=self._spec.model_dump_json(),
                body=body,
            )
        raise CallBatched
