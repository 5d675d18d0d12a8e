"""PDF files as a model views them, through a real host and its sandbox."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.model_hands import ModelHands
from tests.integration.workspace_hosts import opened

SANDBOXES = ["none", pytest.param("bwrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap"))]


def pdf(*pages: str) -> bytes:
    """Return a document with a line of text on each page."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        font = "/Resources<</Font<</F1 3 0 R>>>>"
        objects.append(f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]{font}/Contents {5 + 2 * number} 0 R>>")
        objects.append(f"<</Length {len(stream)}>>stream\n{stream}\nendstream")
    written, offsets = "%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        offsets.append(len(written))
        written += f"{number} 0 obj{text}endobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    start = len(written)
    size = len(objects) + 1
    written += (
        f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer<</Size {size}/Root 1 0 R>>\nstartxref\n{start}\n%%EOF"
    )
    return written.encode()


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_the_pages_of_a_pdf_are_shown_as_text(sandbox: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "node", sandbox=sandbox) as workspaces:
        hands = ModelHands(await workspaces.open("conversation"))
        base = (await hands.bash("pwd")).content
        folder = tmp_path / "node" / "conversation" / "workspace"
        (folder / "a.pdf").write_bytes(pdf("First words", "Second words", "Third"))
        (folder / "long.PDF").write_bytes(pdf(*["words " * 500] * 30))
        (folder / "broken.pdf").write_bytes(b"%PDF-1.4\nnothing")
        (folder / "flat.pdf").write_bytes(pdf("x").replace(b"/Kids[4 0 R]", b"/Kids[2 0 R]"))
        assert await hands.edit("view", f"{base}/a.pdf") == (
            f"The text of {base}/a.pdf, 3 pages:\n--- page 1 ---\nFirst words\n--- page 2 ---\nSecond words\n"
            "--- page 3 ---\nThird"
        )
        second = await hands.edit("view", f"{base}/a.pdf", view_range=[2, 2])
        assert second.endswith("3 pages:\n--- page 2 ---\nSecond words")
        assert "has the pages 1 to 3" in await hands.edit("view", f"{base}/a.pdf", view_range=[4, 5])
        long = await hands.edit("view", f"{base}/long.PDF")
        assert len(long) < 25_000
        assert long.endswith("[Cut here. Give `view_range` to see pages from 8 on.]")
        for name in ("broken.pdf", "flat.pdf"):
            assert (await hands.edit("view", f"{base}/{name}")).startswith(f"ERROR:\n{base}/{name}: ")
        assert "is not a file" in await hands.edit("view", f"{base}/none.pdf")
        assert "only the `view` command" in await hands.edit("str_replace", f"{base}/a.pdf", old_str="a", new_str="b")
