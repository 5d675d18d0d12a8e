"""Sources of skills that tasks name, and the places that the operator allows."""

from __future__ import annotations

import pytest

from broker.contract.skill_sources import SkillSourceRule, find_skill_folders, parse_skill_source

COMMIT, DIGEST = "0123456789" * 4, "ab" * 32


def archive(address: str) -> str:
    return f"{address}#sha256={DIGEST}"


@pytest.mark.parametrize(
    ("text", "kind", "address", "pin", "place"),
    [
        (f"git+https://git.example.com/team/skills#{COMMIT}", "git", "https://git.example.com/team/skills", COMMIT, ""),
        (archive("https://Example.COM:443/a.tar.gz"), "archive", "https://Example.COM:443/a.tar.gz", DIGEST, "ok"),
        (archive("http://10.0.0.7:8080/a.zip"), "archive", "http://10.0.0.7:8080/a.zip", DIGEST, "10.0.0.7:8080/a.zip"),
        ("/srv//skills/./team/", "folder", "/srv/skills/team", "", "/srv/skills/team"),
    ],
)
def test_source_is_parsed(text: str, kind: str, address: str, pin: str, place: str) -> None:
    places = {"": "git.example.com/team/skills", "ok": "example.com/a.tar.gz"}
    found = parse_skill_source(text)
    assert (found.kind, found.address, found.pin, found.place) == (kind, address, pin, places.get(place, place))


@pytest.mark.parametrize(
    "text",
    [
        "skills",
        "../skills",
        "/srv/skills/../../etc",
        "/srv/skills\n",
        f"git+https://git.example.com/team/skills#{COMMIT}\n",
        archive("https://example.com/a.tar.gz") + "\n",
        "git+https://git.example.com/team/skills",
        "git+https://git.example.com/team/skills#main",
        f"git+file:///srv/skills#{COMMIT}",
        f"git+ssh://git@example.com/skills#{COMMIT}",
        f"https://example.com/skills#{COMMIT}",
        "https://example.com/a.tar.gz",
        "https://example.com/a.tar.gz#sha256=12",
        archive("file:///etc/passwd"),
        archive("https://user:word@example.com/a.tar.gz"),
        archive("https://example.com@evil.example/a.tar.gz"),
        archive("https://example.com\\@evil.example/a.tar.gz"),
        archive("https://example.com/team/../other/a.tar.gz"),
        archive("https://example.com/team/%2e%2e/other/a.tar.gz"),
        archive("https://example.com/team//a.tar.gz"),
        archive("https://example.com/a.tar.gz?x=y"),
        archive("https://0x7f000001/a.tar.gz"),
        archive("https://127.1/a.tar.gz"),
        archive("https://example.com:99999/a.tar.gz"),
        archive(f"https://example.com/{'a' * 1_000}"),
    ],
)
def test_ambiguous_or_unpinned_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_skill_source(text)


@pytest.mark.parametrize(
    ("rule", "tenant", "source", "is_allowed"),
    [
        ("example.com", "", archive("https://example.com/a.tar.gz"), True),
        ("EXAMPLE.com/team/", "", archive("https://example.com/team/a.tar.gz"), True),
        ("example.com/team", "", archive("https://example.com/teams/a.tar.gz"), False),
        ("example.com/team", "", archive("https://example.com.evil.example/team/a.tar.gz"), False),
        ("example.com", "", archive("https://sub.example.com/a.tar.gz"), False),
        ("example.com", "", archive("https://example.com:8443/a.tar.gz"), False),
        ("example.com:8443", "", archive("https://example.com:8443/a.tar.gz"), True),
        ("example.com:80", "", archive("http://example.com:80/a.tar.gz"), True),
        ("example.com:80", "", archive("http://example.com/a.tar.gz"), True),
        ("example.com:80", "", archive("https://example.com/a.tar.gz"), False),
        ("example.com:443/team", "", archive("https://example.com/team/a.tar.gz"), True),
        ("example.com:443", "", archive("http://example.com/a.tar.gz"), False),
        ("example.com", "", archive("http://example.com:80/a.tar.gz"), True),
        ("acme=example.com", "acme", archive("https://example.com/a.tar.gz"), True),
        ("acme=example.com", "other", archive("https://example.com/a.tar.gz"), False),
        ("acme=example.com", "", archive("https://example.com/a.tar.gz"), False),
        ("/srv/skills", "", "/srv/skills", True),
        ("/srv/skills", "", "/srv/skills/team", True),
        ("/srv/skills", "", "/srv/skills-of-others", False),
        ("/srv/skills", "", "/etc", False),
        ("/", "", "/etc", True),
    ],
)
def test_rule_allows_what_is_below_its_place(rule: str, tenant: str, source: str, is_allowed: bool) -> None:
    assert SkillSourceRule.parse(rule).allows(parse_skill_source(source), tenant) is is_allowed


@pytest.mark.parametrize(
    "text", ["", "=example.com", "https://example.com", "*.example.com", "example.com/a?b", "../a"]
)
def test_invalid_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        SkillSourceRule.parse(text)


def test_folder_inside_a_skill_is_no_skill() -> None:
    paths = ["a/SKILL.md", "a/b/SKILL.md", "a-b/SKILL.md", "c/README.md", "SKILL.mdx"]
    assert find_skill_folders(paths) == ("a-b/", "a/")
    assert find_skill_folders(["SKILL.md", *paths]) == ("",)
