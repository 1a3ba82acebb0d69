"""Files of the run directory: unfinished lines, atomic writes."""

import json

import pytest
from datasets import Dataset, are_progress_bars_disabled

from credit_trl import run_directory
from credit_trl.run_directory import append_lines, keep_up_to, read_lines, write_atomically, write_json


def test_read_lines_skips_unfinished_and_names_broken_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    append_lines(path, [{"step": 1, "loss": float("nan")}])
    append_lines(path, [{"step": 2, "text": "line\u2028separator"}])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert read_lines(path) == [{"step": 1, "loss": None}, {"step": 2, "text": "line\u2028separator"}]
    assert path.stat().st_mode & 0o111 == 0
    keep_up_to(path, 1)
    assert path.read_text() == '{"step":1,"loss":null}\n'
    for broken in ("not json", '{"a":' * 100_000):
        path.write_text(f'{{"step": 1}}\n{broken}\n')
        with pytest.raises(ValueError, match=r"log\.jsonl, line 2"):
            read_lines(path)


def test_rows_that_parquet_cannot_hold_end_no_run(tmp_path, caplog):
    data = {"task": None, "train": None}
    run_directory.store_rows(tmp_path, data, {"train": Dataset.from_list([{"prompt": "1+1=", "extra": {}}])})
    assert (data["train"], "The rows are not stored" in caplog.text) == (None, True)
    assert not are_progress_bars_disabled()


def test_functions_without_an_import_name_have_none(tmp_path):
    assert run_directory.describe_function(lambda: 0)["name"] is None
    assert run_directory.file_versions(tmp_path / "none") == {}


def test_names_of_saved_files_lead_nowhere_else():
    assert list(filter(run_directory._is_name, ["a", "", ".", "..", "../a", "a/b", 3, None])) == ["a"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "a.json"
    write_json(path, {"old": 1})
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert json.loads(path.read_text()) == {"old": 1}
    monkeypatch.undo()
    write_atomically(path, "new")  # beside what the failed one has left
    assert path.read_text() == "new"


@pytest.mark.parametrize("exists", [True, False])
def test_failed_append_leaves_no_part_of_a_line(tmp_path, monkeypatch, exists):
    path = tmp_path / "log.jsonl"
    if exists:
        append_lines(path, [{"step": 1}])
    content = path.read_text() if exists else ""

    def fail(written):
        assert len(written.read_text()) > len(content)
        raise OSError("No space left on device")

    monkeypatch.setattr(run_directory, "sync", fail)
    with pytest.raises(OSError, match="No space"):
        append_lines(path, [{"step": 2}, {"step": 3}])
    assert path.read_text() == content
