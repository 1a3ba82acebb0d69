from __future__ import annotations

import json

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.tasks.records import Row, RowError, Tally, accept, content_hash, dataset_of, read_rows, task_folder


def example(number: int) -> dict:
    return {"prompt": [{"role": "user", "content": str(number)}], "answer": "a", "task": "t", "id": str(number)}


JSON_OBJECTS = st.lists(
    st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=4)), max_size=5
)


@settings(max_examples=30, deadline=None)
@given(rows=JSON_OBJECTS, ascii_only=st.booleans())
def test_json_list_and_json_lines_give_the_same_rows(tmp_path_factory, rows, ascii_only):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "list.json").write_text(json.dumps(rows, ensure_ascii=True), encoding="utf-8")
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    if not ascii_only:
        lines = [line.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for line in lines]
        rows = [json.loads(line) for line in lines]
    (folder / "lines.json").write_text("\n".join(lines), encoding="utf-8", newline="")
    assert [row.data for row in read_rows(folder / "lines.json")] == rows
    if ascii_only:
        assert [row.data for row in read_rows(folder / "list.json")] == rows


def test_row_numbers_are_line_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert [(row.number, row.data["a"]) for row in read_rows(path)] == [(1, 1), (3, 2)]


def test_json_values_are_read_without_type_inference(tmp_path):
    """The JSON loader of `datasets` reads the first two as numbers and the third as a date."""
    path, answers = tmp_path / "rows.jsonl", ["1e-05", "07", "2020-01-01", 2, 10**30, [["f", {}], "text"], True]
    path.write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in answers))
    read = [row.data["answer"] for row in read_rows(path)]
    assert read == answers
    assert [type(answer) for answer in read] == [type(answer) for answer in answers]


def test_control_characters_of_parquet_files_are_spelled_out(tmp_path, capsys):
    Dataset.from_list([{"ques\x1b[2Jtion": "x"}]).to_parquet(tmp_path / "rows\x1b.parquet")
    [row] = read_rows(tmp_path / "rows\x1b.parquet")
    with pytest.raises(RowError) as caught:
        row.text("question")
    assert str(caught.value).isprintable()
    assert "U+001B" in str(caught.value)
    (tmp_path / "bad\x1b.parquet").write_bytes(b"PAR1 and then something else PAR1")
    with pytest.raises(ValueError, match=r"U\+001B") as caught:
        list(read_rows(tmp_path / "bad\x1b.parquet"))
    assert str(caught.value).isprintable()


def test_parquet_rows_equal_what_was_written(tmp_path):
    """Paths with the characters of a glob pattern included."""
    rows = [example(number) | {"n": number, "tags": ["x"] * number} for number in range(70)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows[1].parquet")
    read = list(read_rows(tmp_path / "rows[1].parquet"))
    assert [row.data for row in read] == rows
    assert [row.number for row in read] == list(range(1, 71))


@pytest.mark.parametrize(
    ("content", "row"),
    [
        ('{"a": 1}\n{"a": \n', 2),
        ('{"a": 1}\n[1]\n', 2),
        ('[{"a": 1}, 2]', 2),
        ('[{"a": 1}', 1),
        ("not json", 1),
        ('{"a": ' + "[" * 100_000 + "\n", 1),
        ('{"a": ' + "9" * 5000 + "}", 1),
    ],
    ids=["cut line", "a list", "a number", "cut list", "text", "too deep", "too long a number"],
)
def test_line_that_is_not_an_object_raises_with_its_number(tmp_path, content, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(RowError, match=rf"rows\.jsonl, row {row}, field '\(whole row\)'"):
        list(accept(read_rows(path), lambda row: row.data, Tally("t"), "raise"))


@pytest.mark.parametrize("broken", ['{"n": ', "[1]", "3"], ids=["cut", "a list", "a number"])
def test_line_that_is_not_an_object_can_be_dropped(tmp_path, broken, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"n": 0}}\n{broken}\n{{"n": 2}}\n')
    tally = Tally("t")
    assert list(accept(read_rows(path), lambda row: row.get("n", int), tally, "drop")) == [0, 2]
    assert tally.dropped == {"malformed in '(whole row)'": 1}
    assert f"dropped: {path}, row 2, field '(whole row)'" in capsys.readouterr().err
    with pytest.raises(RowError, match="row 2"):
        [row.get("n", int) for row in read_rows(path)]


def test_wrong_path_suffix_or_encoding_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"\.json, \.jsonl, \.parquet"):
        read_rows(tmp_path / "absent.jsonl")
    (tmp_path / "rows.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"not from \.pkl"):
        read_rows(tmp_path / "rows.pkl")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and then something else PAR1")
    with pytest.raises(ValueError, match=r"rows\.parquet cannot be read as parquet"):
        list(read_rows(tmp_path / "rows.parquet"))
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_shards_number_rows_on_and_errors_name_the_shard(tmp_path):
    shards = [tmp_path / f"{name}.jsonl" for name in ("one", "two", "three")]
    for shard, text in zip(shards, ('{"n": 0}\n\n{"n": 1}\n', "", '{"n": 2}\n[]\n'), strict=True):
        shard.write_text(text)
    *good, bad = read_rows(shards)
    assert [(row.source, row.number, row.data["n"]) for row in good] == [
        (str(shards[0]), 1, 0),
        (str(shards[0]), 3, 1),
        (str(shards[2]), 4, 2),
    ]
    with pytest.raises(RowError, match=r"three\.jsonl, row 1, field 'm': missing"):
        good[-1].get("m", int)
    with pytest.raises(RowError, match=r"three\.jsonl, row 2, field '\(whole row\)'"):
        bad.get("n", int)


def test_folder_of_a_task_is_the_subfolder_of_its_name(tmp_path):
    assert task_folder(tmp_path, "math") == tmp_path
    (tmp_path / "math").write_text("a file")
    (tmp_path / "toolalpaca").mkdir()
    assert task_folder(tmp_path, "math") == tmp_path
    assert task_folder(tmp_path, "toolalpaca") == tmp_path / "toolalpaca"


@pytest.mark.parametrize(
    ("data", "problem"),
    [({}, "missing"), ({"a": None}, "NoneType"), ({"a": 3}, "int"), ({"a": " \n"}, "blank"), ({"a": True}, "bool")],
)
def test_text_field_must_be_a_nonblank_text(data, problem):
    with pytest.raises(RowError, match=rf"f\.jsonl, row 7, field 'a': .*{problem}"):
        Row("f.jsonl", 7, data).text("a")


@pytest.mark.parametrize("value", ["a\ud800", ["b", "\udfff"], {"text": ["c", "\ud83d"]}, {"\udc00": 1}])
def test_lone_surrogate_raises_at_any_depth(value):
    """JSON can escape a lone surrogate, but files, tables and tokenizers cannot hold it."""
    with pytest.raises(RowError, match=r"f\.jsonl, row 7, field 'a': contains the lone surrogate '\\ud"):
        Row("f.jsonl", 7, json.loads(json.dumps({"a": value}))).get("a", (str, list, dict))
    assert Row("f.jsonl", 7, {"a": "\U0001f600"}).text("a") == "\U0001f600"


def test_bool_is_not_accepted_as_int():
    with pytest.raises(RowError, match="expected int, got bool"):
        Row("f", 1, {"a": True}).get("a", int)


def refuse_odd(row: Row) -> int:
    if row.data["n"] % 2:
        raise row.error("n", "odd")
    return row.data["n"]


ROWS = [Row("f.jsonl", n + 1, {"n": n}) for n in range(5)]


def test_malformed_row_raises_by_default():
    with pytest.raises(RowError, match=r"f\.jsonl, row 2, field 'n': odd"):
        list(accept(ROWS, refuse_odd, Tally("t"), "raise"))


def test_malformed_row_can_be_dropped_printed_and_counted(capsys):
    tally = Tally("t")
    assert list(accept(ROWS, refuse_odd, tally, "drop")) == [0, 2, 4]
    assert tally.dropped == {"malformed in 'n'": 2}
    assert capsys.readouterr().err.count("dropped: f.jsonl, row ") == 2


def test_on_malformed_is_raise_or_drop():
    with pytest.raises(ValueError, match="'raise' or 'drop'"):
        list(accept(ROWS, refuse_odd, Tally("t"), "ignore"))


def test_hostile_strings_are_printed_escaped(capsys):
    tally = Tally("rows")
    tally.drop("of domain \x1b]0;owned\x07\nnext")
    assert "1 of domain ⟨U+001B⟩]0;owned⟨U+0007⟩⟨U+000A⟩next" in str(tally)
    assert str(RowError("a.jsonl", 1, "id", "the row has \x1b[2J")).endswith("the row has ⟨U+001B⟩[2J")


def test_tally_is_printed_and_kept_as_description(capsys):
    tally = Tally("bench train")
    tally.drop("too long", 3)
    tally.drop("never happened", 0)
    built = dataset_of([example(1), example(2)], tally)
    line = f"bench train: 5 read, 2 kept, 3 dropped (3 too long), sha256 {content_hash([example(1), example(2)])}"
    assert capsys.readouterr().err.strip() == line
    assert built.info.description == line
    assert built.select(range(1)).info.description == line


def test_no_rows_left_raises_with_the_tally():
    tally = Tally("bench train")
    tally.drop("too long", 3)
    with pytest.raises(ValueError, match=r"No rows left.*3 too long"):
        dataset_of([], tally)
