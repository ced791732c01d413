"""Text and conversations from files: the reading half of the data; ``data`` makes rows of it."""

import json
import math
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

__all__ = ["Conversation", "read_conversations", "read_texts", "stdlib_sources"]

Conversation = list[dict[str, str]]
"""Messages in order, each with ``role`` and ``content``."""

_NOT_SOURCES = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


def read_texts(paths: str | Path | Iterable[str | Path]) -> list[str]:
    """The texts of files, UTF-8, each file one; files without text are left out.

    Args:
        paths: files or patterns such as ``src/**/*.py``, one or several. What a pattern finds is
            sorted.

    Raises:
        ValueError: a pattern finds no file, a file is not UTF-8, or no file has any text.
    """
    texts = [_utf8("read_texts", path) for path in _files("read_texts", paths)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"read_texts: the files must hold text, got {paths}, all of them empty.")
    return texts


def read_conversations(paths: str | Path | Iterable[str | Path]) -> list[Conversation]:
    """Conversations from JSON Lines files: one JSON object a line, blank lines apart.

    A line is ``{"messages": [{"role": ..., "content": ...}, ...]}``, or
    ``{"prompt": ..., "response": ...}``, which stands for a message of the user and one of the
    assistant. Other keys are ignored.

    Args:
        paths: files or patterns, as for ``read_texts``.

    Raises:
        ValueError: a pattern finds no file, a file is not UTF-8 or has no line, or a line is none
            of the two; the message has the file and the line.
    """
    conversations = []
    for path in _files("read_conversations", paths):
        lines = _utf8("read_conversations", path).split("\n")  # JSON may hold other line ends
        numbered = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
        if not numbered:
            raise ValueError(f"read_conversations: a file must have a line, {path} is empty.")
        conversations += [_conversation(line, f"{path}:{i}") for i, line in numbered]
    return conversations


def stdlib_sources(*, max_bytes: int | None = None) -> Iterator[str]:
    """The standard library's own modules as text, in the order of their paths; tests are left out.

    Args:
        max_bytes: a file that would exceed this sum of UTF-8 bytes is passed over.

    Raises:
        ValueError: this Python has no sources, or none so small.

    Examples:
        >>> "def " in next(stdlib_sources(max_bytes=100_000))
        True
    """
    root = Path(sysconfig.get_path("stdlib"))
    left, num = math.inf if max_bytes is None else max_bytes, 0
    for path in sorted(_modules(root), key=Path.as_posix):
        if path.stat().st_size > left:
            continue
        text = _source(path)
        size = len(text.encode())  # another than the file's where its encoding is
        if text.strip() and size <= left:
            left, num = left - size, num + 1
            yield text
    if not num:
        raise ValueError(
            f"stdlib_sources: {root} must have a source of at most {max_bytes=}, found none. "
            "Raise the limit, or use read_texts on text of your own."
        )


def _files(name: str, paths: str | Path | Iterable[str | Path]) -> list[Path]:
    found: list[Path] = []
    for pattern in [paths] if isinstance(paths, str | Path) else paths:
        exact = Path(pattern).is_file()  # also a file whose name has brackets
        matches = [str(pattern)] if exact else sorted(glob(str(pattern), recursive=True))
        files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            raise ValueError(f"{name}: a path must name a file, {str(pattern)!r} matches none.")
        found += files
    return found


def _utf8(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: a file must be UTF-8, {path} is not: {error}.") from error


def _modules(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_SOURCES]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _source(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # follows the file's coding line
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _conversation(line: str, place: str) -> Conversation:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"read_conversations: a line must be JSON, {place}: {error}.") from error
    messages = _messages(found)
    if messages is None:
        raise ValueError(
            "read_conversations: a line must have messages with role and content, or a prompt and "
            f"a response, all of them strings, {place} has {line[:80]}."
        )
    return messages


def _messages(found: Any) -> Conversation | None:
    if not isinstance(found, Mapping):
        return None
    if "messages" in found:
        messages = found["messages"]
    else:
        messages = [
            {"role": "user", "content": found.get("prompt")},
            {"role": "assistant", "content": found.get("response")},
        ]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        return None
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
