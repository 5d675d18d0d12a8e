"""Programs that print more than anybody reads: bounded memory, and neighbours that do not wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.integration.workspace_hosts import Terminal, main_pid, opened

KEPT_BYTES = 256 * 1024
HOST_LIMIT_BYTES = 24 * 2**20
CUT = "\n[... Observation truncated due to length ...]\n"
ALWAYS = {"timeout": 120, "blocking": True}


@pytest.mark.parametrize(
    ("command", "size", "head", "tail"),
    [
        ("yes abcdefg | head -c 100000000", 100_000_000, "abcdefg\nabcdefg\n", "abcdefg\nabcdefg"),
        ("seq 1000000", 6_888_896, "1\n2\n3\n", "\n999999\n1000000"),
        ("head -c 10000000 /dev/zero | tr '\\0' x; echo", 10_000_001, "xxxx", "xxxx"),
    ],
)
async def test_head_and_tail_are_kept_in_bounded_memory(
    tmp_path: Path, command: str, size: int, head: str, tail: str
) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        answer = await run(command, **ALWAYS)
        assert answer.fields["omitted_bytes"] == size - KEPT_BYTES
        assert answer.content.startswith(head)
        assert answer.content.endswith(tail)
        assert answer.content.count(CUT) == 1
        assert len(answer.content) <= KEPT_BYTES + len(CUT)
        assert psutil.Process(main_pid(tmp_path, "conversation")).memory_info().rss < HOST_LIMIT_BYTES
        assert (await run("echo next")).content == "next"


async def test_bytes_of_every_kind_are_text_in_the_end(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        program = "import random, sys; sys.stdout.buffer.write(random.Random(1).randbytes(3000000))"
        answer = await run(f'python3 -c "{program}"; echo; echo end', **ALWAYS)
        assert answer.content.endswith("end")
        assert {character for character in answer.content if ord(character) < 32} <= {"\n", "\t"}
        assert answer.exit_code == 0


async def test_neighbours_go_on_while_one_floods(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        flooding = Terminal(await workspaces.open("flooding"))
        quiet = Terminal(await workspaces.open("quiet"))
        flood = asyncio.create_task(flooding("yes abcdefg | head -c 100000000; echo over", **ALWAYS))
        answers = 0
        while not flood.done():
            assert (await quiet("echo fine")).content == "fine"
            answers += 1
        assert answers > 10
        assert (await flood).content.endswith("over")


async def test_many_small_pieces_are_one_output(tmp_path: Path) -> None:
    async with opened(tmp_path, sandbox="bwrap") as workspaces:
        run = Terminal(await workspaces.open("conversation"))
        program = "import os\nfor n in range(20000): os.write(1, b'%d\\n' % n)"
        answer = await run(f'python3 -c "{program}"', **ALWAYS)
        assert answer.content.split() == [str(number) for number in range(20_000)]
