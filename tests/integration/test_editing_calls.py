"""The editor, patches, searches and documents as a model's calls meet them, through a real host."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from broker.contract.code_search import CodeSearchObservation
from broker.contract.file_events import FileEditObservation
from broker.contract.observations import ErrorObservation
from tests.integration.model_hands import ModelHands
from tests.integration.workspace_hosts import opened
from tool_worker.workspace.workspaces import Workspaces

SANDBOXES = ["none", pytest.param("bwrap", marks=pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap"))]
TILL = "class Till:\n    limit = 3\n\n    def open(self):\n        return self.limit\n\n    def close(self):\n        pass\n"
PATCH = """*** Begin Patch
*** Update File: till.py
@@ class Till:
-    limit = 3
+    limit = 4
@@ def close(self):
-        pass
+        return 0
*** Add File: deep/new.txt
+one
+two
*** Delete File: old.txt
*** End Patch"""
DIFF = """diff --git a/till.py b/till.py
index 1..2 100644
--- a/till.py
+++ b/till.py
@@ -1,3 +1,3 @@
 class Till:
-    limit = 3
+    limit = 4
\x20
@@ -7,2 +7,2 @@ class Till:
     def close(self):
-        pass
+        return 0
--- /dev/null
+++ b/deep/new.txt
@@ -0,0 +1,2 @@
+one
+two
--- a/old.txt
+++ /dev/null
@@ -1 +0,0 @@
-old
"""


@pytest.fixture
async def hands(workspaces: Workspaces) -> ModelHands:
    return ModelHands(await workspaces.open("conversation"), enable_patch=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "node" / "conversation" / "workspace"


async def test_several_replacements_are_made_at_once_or_not_at_all(hands: ModelHands, folder: Path) -> None:
    path = folder / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    edits = [{"old_str": "one", "new_str": "1\n1b"}, {"old_str": "three", "new_str": "3"}]
    text = await hands.edit("str_replace", path, edits=edits)
    assert path.read_text() == "1\n1b\ntwo\n3\n"
    assert text.startswith(f"The file {path} has been edited (2 replacements). ")
    assert "     1\t1\n     2\t1b\n     3\ttwo\n     4\t3\n" in text
    refused = await hands.edit("str_replace", path, edits=[{"old_str": "two", "new_str": "2"}, *edits])
    assert "did not appear verbatim" in refused
    assert "(edit 2 of 3; none was made)" in refused
    assert path.read_text() == "1\n1b\ntwo\n3\n"
    assert "undone" in await hands.edit("undo_edit", path)
    assert path.read_text() == "one\ntwo\nthree\n"


async def test_every_occurrence_is_replaced_where_that_is_asked_for(hands: ModelHands, folder: Path) -> None:
    path = folder / "a.txt"
    path.write_text("x y x\n" * 3)
    assert "Multiple occurrences" in await hands.edit("str_replace", path, old_str="x", new_str="z")
    text = await hands.edit("str_replace", path, old_str="x", new_str="z", replace_all=True)
    assert "(6 replacements)" in text
    assert path.read_text() == "z y z\n" * 3
    assert "did not appear" in await hands.edit("str_replace", path, old_str="x", new_str="z", replace_all=True)


@pytest.mark.parametrize("edits", [[], "x", [1], [{"old_str": 1}], [{"new_str": "x"}], [{"old_str": "a"}] * 201])
async def test_invalid_list_of_edits_is_refused(hands: ModelHands, folder: Path, edits: object) -> None:
    (folder / "a.txt").write_text("a\n")
    try:
        text = await hands.edit("str_replace", folder / "a.txt", edits=edits)
    except ValueError as error:  # refused before it gets to the host
        text = str(error)
    assert "edits" in text
    assert (folder / "a.txt").read_text() == "a\n"


async def test_file_is_created_with_directories_and_overwritten_on_request(hands: ModelHands, folder: Path) -> None:
    path = folder / "deep" / "er" / "a.txt"
    assert "created" in await hands.edit("create", path, file_text="one\r\n")
    refused = await hands.edit("create", path, file_text="two\n")
    assert "Set `overwrite` to true" in refused
    assert "overwritten" in await hands.edit("create", path, file_text="two\nthree\n", overwrite=True)
    assert path.read_bytes() == b"two\r\nthree\r\n"
    assert "is a directory" in await hands.edit("create", folder / "deep", file_text="", overwrite=True)
    (folder / "file").write_text("x")
    assert "ERROR" in await hands.edit("create", folder / "file" / "a", file_text="")


async def test_edit_of_a_file_changed_since_view_is_refused(hands: ModelHands, folder: Path) -> None:
    path = folder / "a.txt"
    path.write_text("one\n")
    assert "edited" in await hands.edit("str_replace", path, old_str="one", new_str="two")  # never viewed
    path.write_text("three\n")
    assert "edited" in await hands.edit("str_replace", path, old_str="three", new_str="four")
    await hands.edit("view", path)
    await hands.bash("echo more >> a.txt")
    for command, arguments in (
        ("str_replace", {"old_str": "four", "new_str": "5"}),
        ("insert", {"insert_line": 0, "new_str": "0"}),
        ("create", {"file_text": "", "overwrite": True}),
    ):
        refused = await hands.edit(command, path, **arguments)
        assert "has changed on disk since you last viewed it" in refused
    assert path.read_text() == "four\nmore\n"
    await hands.edit("view", path, view_range=[1, 1])
    assert "edited" in await hands.edit("str_replace", path, old_str="four", new_str="5")
    assert "edited" in await hands.edit("insert", path, insert_line=0, new_str="0")
    path.unlink()
    path.write_text("0\n5\nmore\n")  # another file with the same content is as good
    assert "edited" in await hands.edit("insert", path, insert_line=0, new_str="-")


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_obvious_errors_after_an_edit_are_reported(sandbox: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "node", sandbox=sandbox) as workspaces:
        hands = ModelHands(await workspaces.open("conversation"))
        base = (await hands.bash("pwd")).content
        text = await hands.edit("create", f"{base}/a.py", file_text="def f(:\n    pass\n")
        assert "[Check after the edit:\na.py: line 1: invalid syntax (as Python 3." in text
        assert "Check" not in await hands.edit("str_replace", f"{base}/a.py", old_str="(:", new_str="():")
        assert "a.json: Expecting" in await hands.edit("create", f"{base}/a.json", file_text="{")
        assert "Check" not in await hands.edit("create", f"{base}/a.txt", file_text="def f(:")
        hostile = "(" * 100_000
        assert "created" in await hands.edit("create", f"{base}/b.py", file_text=hostile)


async def test_checkers_of_the_workspace_are_asked(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ruff").write_text('#!/bin/sh\nfor last; do :; done\necho "$last:2:1: F821 Undefined name \\`y\\`"\n')
    (programs / "ruff").chmod(0o755)
    async with opened(tmp_path / "node", environment={"PATH": f"{programs}:{os.defpath}"}) as workspaces:
        hands = ModelHands(await workspaces.open("conversation"))
        base = (await hands.bash("pwd")).content
        text = await hands.edit("create", f"{base}/a.py", file_text="x = 1\ny\n")
        assert text.endswith("[Check after the edit:\na.py: line 2:1: F821 Undefined name `y`]")


@pytest.mark.parametrize("patch", [PATCH, DIFF], ids=["envelope", "diff"])
async def test_a_patch_changes_several_files(hands: ModelHands, folder: Path, patch: str) -> None:
    (folder / "till.py").write_text(TILL)
    (folder / "old.txt").write_text("old\n")
    done = await hands("apply_patch", patch=patch)
    assert isinstance(done, FileEditObservation)
    assert done.content == "Success. Updated the following files:\nM till.py\nA deep/new.txt\nD old.txt"
    assert (folder / "till.py").read_text() == TILL.replace("3", "4").replace("pass", "return 0")
    assert (folder / "deep/new.txt").read_text() == "one\ntwo\n"
    assert not (folder / "old.txt").exists()
    assert done.diff is not None
    assert "+    limit = 4" in done.diff


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("", "begins with neither"),
        ("*** Begin Patch\n*** End Patch", "It changes no file."),
        ("*** Begin Patch\n*** Delete File: old.txt", "`*** End Patch` is missing"),
        (PATCH.replace("limit = 3", "limit = 7"), "These lines are not in till.py:\n    limit = 7"),
        (PATCH.replace("@@ class Till:", "@@ class Shop:"), "There is no line `class Shop:` in till.py."),
        (PATCH.replace("deep/new.txt", "old.txt"), "There is a file at "),
        (PATCH.replace("old.txt", "none.txt"), "No such file"),
        (PATCH.replace("old.txt", "till.py"), "It changes till.py twice"),
        (PATCH.replace("deep/new.txt", "till.py/new.txt"), "No patch was applied."),
        (PATCH.replace("+one", "one"), "This line fits nowhere in it: `one`."),
        ("--- a/x\n+++ b/x\n@@ nonsense\n", "This line fits nowhere"),
        ("*** Begin Patch\n*** Update File: a\0b\n+x\n*** End Patch", "NUL"),
    ],
)
async def test_a_patch_that_does_not_fit_changes_nothing(
    hands: ModelHands, folder: Path, patch: str, said: str
) -> None:
    (folder / "till.py").write_text(TILL)
    (folder / "old.txt").write_text("old\n")
    refused = await hands("apply_patch", patch=patch)
    assert isinstance(refused, ErrorObservation)
    assert said in refused.content
    left = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert left == {"till.py": TILL, "old.txt": "old\n"}


async def test_patch_finds_its_place_among_repeats_and_other_blanks(hands: ModelHands, folder: Path) -> None:
    (folder / "a.txt").write_text("a\nx\nb\nx \nc\nx\n")
    patch = "*** Begin Patch\n*** Update File: a.txt\n@@ b\n-x\n+y\n c\n@@\n-x\n+z\n*** End of File\n*** End Patch"
    await hands("apply_patch", patch=patch)
    assert (folder / "a.txt").read_text() == "a\nx\nb\ny\nc\nz\n"
    move = "*** Begin Patch\n*** Update File: a.txt\n*** Move to: b/c.txt\n-y\n+Y\n*** End Patch"
    await hands("apply_patch", patch=move)
    assert (folder / "b/c.txt").read_text() == "a\nx\nb\nY\nc\nz\n"
    assert not (folder / "a.txt").exists()


@pytest.mark.parametrize(
    "patch",
    [
        "*** Begin Patch\n*** Update File: a.py\n@@\n if a:\n-    f()\n+\tg()\n \n   h()\n*** End Patch",
        "--- a/a.py\n+++ b/a.py\n@@ -1,4 +1,4 @@\n if a:\n-    f()\n+\tg()\n \n   h()\n",
    ],
    ids=["envelope", "diff"],
)
async def test_patch_keeps_context_lines_as_the_file_has_them(hands: ModelHands, folder: Path, patch: str) -> None:
    (folder / "a.py").write_text("if a:  \n\tf()\n\t\n\th() \n")
    await hands("apply_patch", patch=patch)
    assert (folder / "a.py").read_text() == "if a:  \n\tg()\n\t\n\th() \n"


async def test_a_patch_that_is_costly_to_place_is_refused(hands: ModelHands, folder: Path) -> None:
    (folder / "a.txt").write_text("x\n" * 200_000)
    old = "-x\n" * 1000 + "-y\n"
    refused = await hands("apply_patch", patch=f"*** Begin Patch\n*** Update File: a.txt\n{old}*** End Patch")
    assert "Too much would have to be compared" in refused.content


async def test_change_is_made_once_despite_repeated_requests(workspaces: Workspaces, folder: Path) -> None:
    workspace = await workspaces.open("conversation")
    patch = "*** Begin Patch\n*** Update File: a.txt\n+x\n*** End Patch"
    (folder / "a.txt").write_text("")
    job = {"command": "echo run >> runs; sleep 1006", "is_background": True}
    first = await workspace.run(1, "patch", {"patch": patch})
    await workspace.run(2, "bash", job)
    again = await workspace.run(1, "patch", {"patch": patch})
    assert again.is_replayed
    assert again.value == first.value
    assert (await workspace.run(2, "bash", job)).is_replayed
    assert (folder / "a.txt").read_text() == "x\n"
    await workspaces.close("conversation")
    workspace = await workspaces.open("conversation")
    assert (await workspace.run(1, "patch", {"patch": patch})).is_replayed
    assert (await workspace.run(2, "bash", job)).is_replayed
    assert (folder / "a.txt").read_text() == "x\n"
    assert (folder / "runs").read_text() == "run\n"


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_searches_begin_where_the_shell_is(sandbox: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "node", sandbox=sandbox) as workspaces:
        hands = ModelHands(await workspaces.open("conversation"))
        await hands.bash("mkdir -p shop/till\necho 'a = 1' > shop/a.py\necho 'b = a' > shop/till/b.py\ncd shop")
        found = await hands("grep", pattern=r"= \w", include="*.py")
        assert isinstance(found, CodeSearchObservation)
        assert sorted(found.content.split("\n\n")) == ["a.py\n1:a = 1", "till/b.py\n1:b = a"]
        assert (await hands("glob", pattern="**/b.*")).content == "till/b.py"
        wrong = await hands("grep", pattern="(")
        assert isinstance(wrong, ErrorObservation)
        assert wrong.content.startswith("ERROR: `pattern` is not a regular expression")
        assert (await hands("glob", pattern="*.py", path="..")).content.splitlines() != []


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
