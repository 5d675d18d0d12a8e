"""The bytes of messages: written once, and forgotten while an answer takes long."""

from controller_worker.providers.messages.message_memo import WrittenMessages, json_bytes
from controller_worker.providers.messages.messages import Message, TextPart
from tests.polling import until

HISTORY = tuple(Message("user", (TextPart(f"message {number}"),)) for number in range(3))


class Writer:
    """Counts what is written."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, message: Message) -> bytes:
        self.count += 1
        return json_bytes([part.text for part in message.content if isinstance(part, TextPart)])


def test_each_message_is_written_once_and_those_left_out_never() -> None:
    writer = Writer()
    written = WrittenMessages(writer)
    assert written.list_bytes(HISTORY[:2]) == [b'["message 0"]', b'["message 1"]']
    assert written.list_bytes(HISTORY, besides={id(HISTORY[2])}) == [b'["message 0"]', b'["message 1"]', b""]
    assert writer.count == 2
    assert written.list_bytes(HISTORY) == [written.bytes_of(message) for message in HISTORY]
    assert writer.count == 3


async def test_slow_answer_frees_bytes_that_the_next_request_rewrites() -> None:
    writer = Writer()
    written = WrittenMessages(writer)
    before = written.list_bytes(HISTORY)
    with written.forget_if_slow(HISTORY, after_seconds=0.0):
        await until(lambda: len(written) == 0, what="the bytes are freed")
    assert written.list_bytes(HISTORY) == before
    assert writer.count == 2 * len(HISTORY)


async def test_a_quick_answer_frees_nothing() -> None:
    written = WrittenMessages(Writer())
    written.list_bytes(HISTORY)
    with written.forget_if_slow(HISTORY, after_seconds=0.01):
        pass
    with written.forget_if_slow(HISTORY[:1], after_seconds=0.02):  # later than the cancelled one
        await until(lambda: len(written) < len(HISTORY), what="the second one has passed")
    assert len(written) == len(HISTORY) - 1
