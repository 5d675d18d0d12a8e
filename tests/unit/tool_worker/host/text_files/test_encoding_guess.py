"""Files in old encodings: decoded correctly, changed without harm to any byte, and never mistaken for others."""

# ruff: noqa: RUF001  (the punctuation of the scripts)

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_worker.host.editor.file_editor import FileEditor
from tool_worker.host.text_files.encoding_guess import decodes, guess_encoding
from tool_worker.host.text_files.text_file import TextFile

RUSSIAN = "# Настройки сервера\nport = 8080  # порт для входящих соединений\nname = 'Главный сервер'\n"
SHORT_RUSSIAN = "print('Привет, мир')\n"
JAPANESE = "// 設定を読み込む\nint port = 80; // サーバーのポート番号です\n"
SHORT_JAPANESE = "puts 'こんにちは、世界'\n"
CHINESE = "# 读取配置文件\nport = 80  # 服务器的端口号，默认是八十\n"
SHORT_CHINESE = "print('你好，世界')\n"
TRADITIONAL = "# 讀取設定檔案\nport = 80  # 伺服器的連接埠，預設是八十，請不要改變這個值\n"
KOREAN = "# 설정 파일을 읽습니다\nport = 80  # 서버의 포트 번호입니다. 바꾸지 마세요\n"
GERMAN = "# Einstellungen für größere Übungen\nname = 'Zürich'\nweiß = 'ä'\n"
FRENCH = "# Réglages généraux: où trouver l'été, à côté du château\nnom = 'Élève'\n"

OLD = [
    (RUSSIAN, "cp1251"),
    (SHORT_RUSSIAN, "cp1251"),
    (RUSSIAN, "koi8_r"),
    (JAPANESE, "cp932"),
    (SHORT_JAPANESE, "cp932"),
    (JAPANESE, "euc_jp"),
    (CHINESE, "gb18030"),
    (SHORT_CHINESE, "gb18030"),
    (TRADITIONAL, "big5"),
    (KOREAN, "euc_kr"),
    *((text, name) for text in (RUSSIAN, JAPANESE, CHINESE, KOREAN, GERMAN) for name in ("utf_16_le", "utf_16_be")),
    ("plain ASCII\n", "utf_16_le"),
]


def edit(path: Path, **arguments: object) -> dict[str, Any]:
    return FileEditor("/").run({"path": str(path), **arguments})


@pytest.mark.parametrize(("text", "name"), OLD)
def test_guessed_encoding_is_shown_and_kept_by_an_edit(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(text.encode(name))
    shown = edit(path, command="view")
    assert not shown["is_error"]
    assert text.splitlines()[0] in shown["content"]
    first = text.splitlines()[0]
    edited = edit(path, command="str_replace", old_str=first, new_str=f"{first} x")
    assert not edited["is_error"], edited["content"]
    assert path.read_bytes() == text.replace(first, f"{first} x", 1).encode(name)


@pytest.mark.parametrize("text", [GERMAN, FRENCH, "naïve\n", "£5 or €6\n", "“quoted” – and more\n"])
def test_western_text_stays_what_it_was(text: str) -> None:
    file = TextFile.decode(text.encode("cp1252"))
    assert (file.encoding, file.text) == ("cp1252", text)


def test_shortened_file_keeps_its_encoding_in_the_same_editor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(f"{CHINESE}end\n".encode("gb18030"))
    editor = FileEditor("/")
    taken = editor.run({"path": str(path), "command": "str_replace", "old_str": CHINESE, "new_str": "# 好\n"})
    assert not taken["is_error"], taken["content"]
    again = editor.run({"path": str(path), "command": "str_replace", "old_str": "好", "new_str": "不好"})
    assert not again["is_error"], again["content"]
    assert path.read_bytes() == "# 不好\nend\n".encode("gb18030")


def test_a_character_that_the_encoding_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(RUSSIAN.encode("cp1251"))
    refused = edit(path, command="str_replace", old_str="порт", new_str="ポート")
    assert "is encoded as cp1251, which has no code for `ポ`" in refused["content"]
    assert path.read_bytes() == RUSSIAN.encode("cp1251")


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 4,
        b"\x7fELF\x02\x01\x01\0" + bytes(1000),
        bytes(1000),
        b"a\0" * 3 + b"\x01\0" * 3,
        os.urandom(4096) + b"\0",
    ],
)
def test_a_binary_file_is_no_text(content: bytes) -> None:
    assert guess_encoding(content) is None


@given(st.binary(max_size=400))
def test_guessed_encoding_preserves_every_byte(content: bytes) -> None:
    name = guess_encoding(content)
    assert name is None or decodes(content, name)
    file = TextFile.decode(content)
    assert file is None or file.encode(file.text) == content


def test_the_time_is_that_of_a_few_decodings() -> None:
    assert guess_encoding((RUSSIAN * 90_000).encode("cp1251")) == "cp1251"
    guess_encoding(os.urandom(10 * 2**20).replace(b"\0", b"x"))
