"""Hooks of the documentation's generator, mkdocs: links out of docs/, generated pages, the list of versions.

Holds: the pages in the tree stay plain Markdown that is read without the site.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
ELSEWHERE = {"../benchmarks/README.md": "benchmarks.md"}
"""Pages that stand outside docs/, and their names in the site."""
MOVED = {
    "developing": "adding-things.html",
    "faq": "index.html#questions-and-answers",
    "migrating-from-openhands": "parity.html#migrating",
}
"""Pages that have become parts of others, and where these are. Their old addresses lead there."""
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Build into the folder of this version, beside those of others."""
    config.site_dir = str(Path(config.site_dir).with_name(VERSION))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, and an index of the decisions."""
    for path, name in ELSEWHERE.items():
        text = (ROOT / "docs" / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    titles = [
        (path.name, path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
        for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))
    ]
    listed = "\n".join(f"- [{title}]({name})" for name, title in titles)
    files.append(File.generated(config, "decisions/index.md", content=f"# Decisions\n\n{listed}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Drop the comments for tests, and show files of the source tree by their paths instead of links."""
    here = "../benchmarks" if page.file.src_uri == "benchmarks.md" else str(Path(page.file.src_uri).parent)

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (ROOT / "docs" / here / target).resolve()
        inside = path.relative_to(ROOT / "docs") if path.is_relative_to(ROOT / "docs") else None
        for name, own in ELSEWHERE.items():
            if path == (ROOT / "docs" / name).resolve():
                inside = Path(own)
        up = "../" * (len(Path(page.file.src_uri).parts) - 1)
        if inside is not None and (inside.suffix in (".md", ".svg", ".png") or str(inside) == "decisions"):
            return f"[{text}]({up}{inside}{'/index.md' if str(inside) == 'decisions' else ''}{anchor})"
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else target
        return text if str(shown) in text else f"{text} (`{shown}`)"

    pieces = []
    end = 0
    for fence in FENCE.finditer(markdown):
        pieces += [_outside(markdown[end : fence.start()], link), fence[0]]
        end = fence.end()
    return "".join([*pieces, _outside(markdown[end:], link)])


def _outside(text: str, link: Any) -> str:
    """Return the text between blocks of code."""
    text = re.sub(r"^<!--.*?-->\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?!\w+:|#)([^)#\s]+)(#[\w-]+)?\)", link, text)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads something from another host.

    Raises:
        PluginError: names the page and what it loads.
    """
    if found := re.search(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*", output):
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found[0]}")
    return output


def on_post_build(config: Any) -> None:
    """Write the list of versions, and the page that leads to this one."""
    site = Path(config.site_dir).parent
    versions = sorted((path.name for path in site.iterdir() if (path / "search").is_dir()), reverse=True)
    listed = [{"version": name, "title": name, "aliases": ["latest"] if name == VERSION else []} for name in versions]
    (site / "versions.json").write_text(json.dumps(listed) + "\n", encoding="utf-8")
    _lead(site / "index.html", f"{VERSION}/index.html")
    for name, place in MOVED.items():
        _lead(site / VERSION / f"{name}.html", place)


def _lead(path: Path, place: str) -> None:
    """Write a page that leads to another place."""
    path.write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={place}"><title>Deckhands</title>\n',
        encoding="utf-8",
    )
