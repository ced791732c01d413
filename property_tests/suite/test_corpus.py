import json

import pytest

from numden.models.corpus import read_conversations, read_texts, stdlib_sources

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\u2028c"}]


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_texts_are_sorted_and_empty_ones_left_out(tmp_path):
    write(tmp_path, b="two", a="one", c=" \n", d="\ufefföne")
    assert read_texts(tmp_path / "*.txt") == ["one", "two", "öne"]
    assert read_texts([tmp_path / "b.txt", str(tmp_path / "a.txt")]) == ["two", "one"]


def test_a_name_that_looks_like_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    assert read_texts(tmp_path / "a[1].txt") == ["one"]


def test_texts_bad_files(tmp_path):
    write(tmp_path, empty="", latin=b"\xe9")
    with pytest.raises(ValueError, match=r"read_texts: a path must name a file, '.*none' matches"):
        read_texts([tmp_path / "none"])
    with pytest.raises(ValueError, match=r"the files must hold text, got .*empty.txt, all"):
        read_texts(tmp_path / "empty.txt")
    with pytest.raises(
        ValueError, match=r"a file must be UTF-8, .*latin.txt is not: 'utf-8' codec"
    ):
        read_texts(tmp_path / "latin.txt")


def test_conversations_of_both_forms(tmp_path):
    lines = [
        json.dumps({"messages": TALK, "id": 3}, ensure_ascii=False),
        "",
        json.dumps({"prompt": "a", "response": "b\u2028c"}),
    ]
    write(tmp_path, talk="\r\n".join(lines))
    assert read_conversations(tmp_path / "talk.txt") == [TALK, TALK]


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": []}',
        '{"messages": "a"}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 3}]}',
        '{"prompt": "a"}',
        '["a"]',
    ],
)
def test_conversations_bad_line(tmp_path, line):
    write(tmp_path, talk=f'{{"prompt": "a", "response": "b"}}\n{line}')
    with pytest.raises(ValueError, match=r"a line must have messages .*talk.txt:2 has ") as caught:
        read_conversations(tmp_path / "talk.txt")
    assert line in str(caught.value)


def test_conversations_bad_files(tmp_path):
    write(tmp_path, empty="\n\n", broken="\n{")
    with pytest.raises(ValueError, match=r"a file must have a line, .*empty.txt is empty"):
        read_conversations(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match=r"a line must be JSON, .*broken.txt:2: Expecting"):
        read_conversations(tmp_path / "broken.txt")


def test_stdlib_sources_are_python_in_one_order():
    sources = list(stdlib_sources(max_bytes=60_000))
    assert sources == list(stdlib_sources(max_bytes=60_000))
    assert 30_000 < sum(len(text.encode()) for text in sources) <= 60_000
    for text in sources:
        compile(text, "source", "exec")


def test_stdlib_sources_too_small():
    with pytest.raises(ValueError, match=r"must have a source of at most max_bytes=1, found none"):
        list(stdlib_sources(max_bytes=1))
