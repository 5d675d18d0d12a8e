"""The output of a cell in its observation."""

from __future__ import annotations

from tool_worker.host.sessions.ipython_session import MAX_IMAGE_CHARS, MAX_IMAGES, CellOutput


def shown(*images: str) -> list[str]:
    output = CellOutput()
    for image in images:
        output.add_message(
            {"msg_type": "display_data", "content": {"data": {"image/png": image, "text/plain": "<Figure>"}}}
        )
    assert output.text.count("<Figure>") == len(images)
    return output.images


def test_images_of_a_cell_are_bounded_together() -> None:
    assert len(shown(*["A"] * 20)) == MAX_IMAGES
    large = "A" * MAX_IMAGE_CHARS
    assert len(shown(large, large, large, "A")) == 2
