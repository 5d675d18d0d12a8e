"""The code map and its queries, on a small shop; and on files that were not written to be parsed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tool_worker.host.search.code_files import pattern_of
from tool_worker.host.search.code_map import CodeMap
from tool_worker.host.search.code_questions import QuestionError, answer_question

SHOP = {
    "shop/__init__.py": "from .till import Till\n",
    "shop/till.py": """\
from shop.money import Money, total as summed
import shop.money


class Drawer:
    def open(self):
        return self.lock()

    def lock(self):
        return Money()


class Till(Drawer):
    @property
    def full(self):
        return False

    def close(self):
        self.lock()
        shop.money.total([])
        return summed([])
""",
    "shop/money.py": """\
class Money:
    pass


def total(coins):
    def add(coin):
        return coin
    return add(coins)
""",
    "tests/test_shop.py": "import shop\n\n\ndef test_till():\n    shop.Till().close()\n",
    "README.md": "How to open the till.\n",
}


@pytest.fixture
def code(tmp_path: Path) -> CodeMap:
    return mapped(tmp_path, SHOP)


def mapped(root: Path, files: dict[str, str]) -> CodeMap:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = CodeMap(str(root))
    code.refresh()
    return code


def explored(code: CodeMap, *starts: str, **arguments: object) -> list[str]:
    return answer_question(code, "explore_tree_structure", {"start_entities": list(starts), **arguments}).splitlines()


def test_the_tree_of_a_class(code: CodeMap) -> None:
    assert explored(code, "shop/till.py:Till") == [
        "shop/till.py:Till [class]",
        "├── contains → shop/till.py:Till.full [function]",
        "├── contains → shop/till.py:Till.close [function]",
        "│   ├── invokes → shop/till.py:Drawer.lock [function]",
        "│   └── invokes → shop/money.py:total [function]",
        "└── inherits → shop/till.py:Drawer [class]",
        "    ├── contains → shop/till.py:Drawer.open [function]",
        "    └── contains → shop/till.py:Drawer.lock [function]",
    ]


def test_who_depends_on_it(code: CodeMap) -> None:
    assert explored(code, "total", direction="upstream", dependency_type_filter=["invokes"]) == [
        "shop/money.py:total [function], what depends on it:",
        "└── invokes ← shop/till.py:Till.close [function]",
    ]
    assert explored(code, "Till", direction="upstream", traversal_depth=1) == [
        "shop/till.py:Till [class], what depends on it:",
        "├── imports ← shop/__init__.py [file]",
        "├── contains ← shop/till.py [file]",
        "└── invokes ← tests/test_shop.py:test_till [function]",
    ]


def test_filters_and_depth(code: CodeMap) -> None:
    assert explored(code, ".", traversal_depth=-1, entity_type_filter=["directory", "file"]) == [
        ". [directory]",
        "├── contains → README.md [file]",
        "├── contains → shop [directory]",
        "│   ├── contains → shop/__init__.py [file]",
        "│   ├── contains → shop/money.py [file]",
        "│   └── contains → shop/till.py [file]",
        "│       ├── imports → shop/__init__.py [file, see above]",
        "│       └── imports → shop/money.py [file, see above]",
        "└── contains → tests [directory]",
        "    └── contains → tests/test_shop.py [file]",
        "        └── imports → shop/__init__.py [file, see above]",
    ]


def test_code_is_shown_with_its_lines(code: CodeMap) -> None:
    assert answer_question(code, "get_entity_contents", {"entity_names": ["Till.full", "nobody"]}) == (
        "shop/till.py:Till.full [function]\n"
        "    14\t    @property\n"
        "    15\t    def full(self):\n"
        "    16\t        return False\n\n"
        "There is no 'nobody'. Names are like `path/file.py`, `path/file.py:Class.method` or `path`."
    )


def test_a_name_of_several_things_is_asked_back(code: CodeMap, tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text("def open():\n    pass\n")
    code.refresh()
    assert answer_question(code, "get_entity_contents", {"entity_names": ["open"]}) == (
        "'open' may be any of 2; name one of them:\nbox.py:open\nshop/till.py:Drawer.open"
    )


def test_long_entities_are_outlined(code: CodeMap, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("class Long:\n" + "".join(f"    def m{n}(self): pass\n" for n in range(150)))
    code.refresh()
    shown = answer_question(code, "get_entity_contents", {"entity_names": ["Long"]}).splitlines()
    assert shown[:2] == ["long.py:Long [class], 151 lines; what it defines:", "2-2      def m0(self): pass"]
    assert len(shown) == 151


def test_words_find_names_and_lines(code: CodeMap) -> None:
    assert answer_question(
        code, "search_code_snippets", {"search_terms": ["till"], "file_path_or_pattern": "**/*.*"}
    ) == (
        "## till\n"
        "shop/till.py:Till [class]\n"
        "    13\tclass Till(Drawer):\n"
        "    14\t    @property\n"
        "    15\t    def full(self):\n"
        "    16\t        return False\n"
        "    17\t\n"
        "    18\t    def close(self):\n"
        "    19\t        self.lock()\n"
        "    20\t        shop.money.total([])\n"
        "    21\t        return summed([])\n"
        "Lines with it:\n"
        "README.md:1: How to open the till.\n"
        "shop/__init__.py:1: from .till import Till\n"
        "shop/till.py:13 (Till): class Till(Drawer):\n"
        "tests/test_shop.py:4 (test_till): def test_till():\n"
        "tests/test_shop.py:5 (test_till): shop.Till().close()"
    )


def test_lines_of_a_file_show_what_they_stand_in(code: CodeMap, tmp_path: Path) -> None:
    where = {"line_nums": [7], "file_path_or_pattern": str(tmp_path / "shop/money.py")}
    assert answer_question(code, "search_code_snippets", where).splitlines() == [
        "shop/money.py:total.add [function]",
        "     6\t    def add(coin):",
        "     7\t        return coin",
    ]


@pytest.mark.parametrize(
    ("question", "arguments", "told"),
    [
        ("search_code_snippets", {}, "Give `search_terms`"),
        ("search_code_snippets", {"line_nums": [1]}, "`line_nums` needs the path of one file"),
        ("search_code_snippets", {"search_terms": [1]}, "`search_terms` is a list of texts"),
        ("search_code_snippets", {"line_nums": ["x"], "file_path_or_pattern": "README.md"}, "is a list of numbers"),
        ("get_entity_contents", {}, "Give at least one name"),
        ("explore_tree_structure", {"start_entities": ["."], "direction": "up"}, "`direction` is one of"),
        ("explore_tree_structure", {"start_entities": ["."], "traversal_depth": "2"}, "`traversal_depth` is a number"),
        ("explore_tree_structure", {"start_entities": ["."], "entity_type_filter": ["moon"]}, "not 'moon'"),
        ("rm", {}, "There is no search named 'rm'"),
    ],
)
def test_unanswerable_queries_are_reported(code: CodeMap, question: str, arguments: dict, told: str) -> None:
    with pytest.raises(QuestionError, match=told):
        answer_question(code, question, arguments)


def test_only_changed_files_are_parsed_again(code: CodeMap, tmp_path: Path) -> None:
    before = code._parsed["shop/money.py"]
    (tmp_path / "shop" / "till.py").write_text("class Other: pass\n")
    (tmp_path / "shop" / "__init__.py").unlink()
    code.refresh()
    assert code._parsed["shop/money.py"] is before
    assert (code.kind_of("shop/till.py:Other"), code.kind_of("shop/till.py:Till")) == ("class", "")
    assert code.kind_of("shop/__init__.py") == ""


def test_nothing_outside_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text("TOKEN = 'canary'\n")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link.py").symlink_to(tmp_path / "secret.py")
    (inside / "up").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe.py")
    code = mapped(inside, {"own.py": "x = 1\n", ".git/hook.py": "canary\n", "node_modules/a.py": "canary\n"})
    assert list(code.files) == ["own.py"]
    everything = {"search_terms": ["canary"], "file_path_or_pattern": "**"}
    assert answer_question(code, "search_code_snippets", everything) == "## canary\nNothing in 1 files."
    for name in ("../secret.py", "link.py", "up/secret.py", str(tmp_path / "secret.py")):
        assert "There is no" in answer_question(code, "get_entity_contents", {"entity_names": [name]})


def test_file_exchanged_for_a_link_is_not_followed(code: CodeMap, tmp_path: Path) -> None:
    (tmp_path / "shop" / "money.py").unlink()
    (tmp_path / "shop" / "money.py").symlink_to("/etc/passwd")
    assert "It cannot be read" in answer_question(code, "get_entity_contents", {"entity_names": ["shop/money.py"]})


HOSTILE = {
    "circle.py": "class A(B): pass\nclass B(A):\n    def f(self):\n        self.nowhere()\n",
    "round.py": "from around import x\nx.y()\n",
    "around.py": "from round import x\n",
    "broken.py": "def f(:\n",
    "deep.py": "(" * 5_000,
    "chain.py": "a" + ".b" * 3_000 + "()\n",
    "binary.py": "\0\0",
    "crooked.py": "class C:\n    def m(self):\n        def n():\n            self.m()\n        n()\n",
}


def test_no_file_stops_the_map(tmp_path: Path) -> None:
    code = mapped(tmp_path, HOSTILE | SHOP)
    assert code.problem_of("broken.py") == "SyntaxError in line 1"
    assert code.problem_of("deep.py") != ""
    shown = answer_question(code, "get_entity_contents", {"entity_names": ["broken.py", "binary.py"]})
    assert "broken.py [file] (it cannot be parsed: SyntaxError in line 1)\n     1\tdef f(:" in shown
    assert "binary.py [file]\nIt cannot be read" in shown
    assert explored(code, "C.m.n")[1] == "└── invokes → crooked.py:C.m [function]"
    assert explored(code, "circle.py", traversal_depth=-1)[:2] == [
        "circle.py [file]",
        "├── contains → circle.py:A [class]",
    ]


def test_answers_are_bounded(tmp_path: Path) -> None:
    code = mapped(tmp_path, {f"m{n}.py": f"def f{n}():\n    return {'x' * 3_000!r}\n" for n in range(400)})
    tree = explored(code, ".", traversal_depth=-1)
    assert len(tree) == 301
    assert tree[-1].startswith("[The rest is left out")
    names = [f"f{n}" for n in range(20)]
    shown = answer_question(code, "get_entity_contents", {"entity_names": names})
    assert len(shown) < 30_000
    assert shown.endswith("[The rest is left out. Ask for fewer things at once.]")


@pytest.mark.parametrize(
    ("glob", "path", "is_match"),
    [
        ("**/*.py", "a.py", True),
        ("**/*.py", "a/b/c.py", True),
        ("*.py", "a/b.py", False),
        ("src/**", "src/a/b.txt", True),
        ("./src/*.{ts,tsx}", "src/a.tsx", True),
        ("src/?.py", "src/ab.py", False),
        ("**/" * 60 + "x", "a/" * 60 + "y", False),
    ],
)
def test_patterns(glob: str, path: str, is_match: bool) -> None:
    assert bool(pattern_of(glob.removeprefix("./")).match(path)) is is_match
