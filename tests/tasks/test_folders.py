"""Which files of a folder a task reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from credit_trl.tasks import livecodebench, load_task, sciknoweval, toolalpaca
from credit_trl.tasks import math as math_task
from credit_trl.tasks.records import FOLDERS


def problems(*answers: str) -> list[dict]:
    return [{"problem": f"q{answer}", "answer": answer} for answer in answers]


def questions(count: int, **changes) -> list[dict]:
    choices = {"text": ["one", "two"], "label": ["A", "B"]}
    row = {"question": "Which?", "choices": choices, "answerKey": "A", "type": "mcq-2-choices", "domain": "Physics"}
    return [row | {"details": {"level": "L3"}} | changes] * count


def write_shards(folder: Path, rows: list[dict], count: int, suffix: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"train-{number:05}-of-{count:05}.{suffix}" for number in range(count)]
    for number, file in enumerate(files):
        part = Dataset.from_list(rows).shard(count, number)
        part.to_parquet(file) if suffix == "parquet" else file.write_text("".join(json.dumps(r) + "\n" for r in part))
    return files


def test_folders_of_several_tasks_are_read_by_name(tmp_path, shared_data, write_jsonl):
    for name in ("sciknoweval:physics", "toolalpaca"):
        built = load_task(name).build("test", shared_data)
        assert built[:] == load_task(name).build("test", shared_data / name.partition(":")[0])[:]
    with pytest.raises(FileNotFoundError, match=r"0 files named test\.jsonl.* toolalpaca/test-first-10\.jsonl"):
        load_task("math").build("test", shared_data)
    write_jsonl(problems("7"), "one/gsm/test.jsonl")
    assert math_task.build("test", tmp_path / "one")["answer"][:] == ["7"]
    for name in ("aaa", "toolalpaca", "zzz"):
        write_jsonl([{"broken": 1}], f"data/{name}/test.jsonl")
    write_jsonl(problems("1", "2"), "data/math/test.jsonl")
    assert math_task.build("test", tmp_path / "data")["answer"][:] == ["1", "2"]


@pytest.mark.parametrize("name", ["livecodebench", "math", "sciknoweval:physics", "toolalpaca"])
def test_subfolders_of_other_tasks_are_not_read(tmp_path, write_jsonl, name):
    prepared = {"prompt": "Which?\n\nA: x\nB: y", "system": "s", "answer": "A", "idx": 0}
    files = {
        "livecodebench": livecodebench.EXAMPLES.read_text("utf-8"),
        "math": json.dumps(problems("1")[0]),
        "sciknoweval": json.dumps(prepared),
        "toolalpaca": json.dumps({"prompt": "Call.", "answer": '[{"Action": "a", "Action_Input": "{}"}]'}),
    }
    assert files.keys() == set(FOLDERS)
    for other in files.keys() - {name.partition(":")[0]}:
        write_jsonl([], f"{other}-alone/{other}/train.jsonl").write_text(files[other], encoding="utf-8")
        with pytest.raises(FileNotFoundError):
            load_task(name).build("train", tmp_path / f"{other}-alone")


def test_toolalpaca_and_livecodebench_read_their_subfolders(tmp_path, write_jsonl, shared_data):
    prepared = (shared_data / "toolalpaca" / "test-first-10.jsonl").read_text("utf-8")
    write_jsonl([{"broken": 1}], "data/math/test.jsonl")
    for name, text in (("toolalpaca", prepared), ("livecodebench", livecodebench.EXAMPLES.read_text("utf-8"))):
        write_jsonl([], f"data/{name}/test.jsonl").write_text(text, encoding="utf-8")
    assert len(toolalpaca.build("test", tmp_path / "data")) == 10
    problems_of = livecodebench.build("test", tmp_path / "data", since="1970-01-01", until="2100-01-01")
    assert len(problems_of) == 8


# ---- math ----


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_shards_give_the_rows_of_the_whole_file(tmp_path, write_jsonl, suffix):
    rows = problems(*map(str, range(25)))
    files = write_shards(tmp_path / "hub" / "data", rows, 12, suffix)
    built = math_task.build("train", tmp_path / "hub")
    whole = math_task.build("train", write_jsonl([row for f in files for row in rows_of(f)]))
    assert built[:] == whole[:]
    assert len(set(built["id"])) == 25
    if suffix == "parquet":
        assert built[:] == math_task.build("train", hub=str(tmp_path / "hub"))[:]


def rows_of(file: Path) -> list[dict]:
    if file.suffix == ".parquet":
        return Dataset.from_parquet(str(file)).to_list()
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def test_files_that_only_begin_like_the_split_are_not_read(tmp_path, write_jsonl):
    for name in ("train-first-10", "train-0-of-1", "train.old", "training", "my-train"):
        write_jsonl([{"broken": 1}], f"data/{name}.jsonl")
    with pytest.raises(FileNotFoundError, match=r"0 files named train\.jsonl"):
        math_task.build("train", tmp_path / "data")
    write_jsonl(problems("1"), "data/deep/train.jsonl")
    assert math_task.build("train", tmp_path / "data")["answer"][:] == ["1"]


def test_split_in_several_places_or_in_part_is_refused(tmp_path, write_jsonl):
    for name in ("algebra", "geometry"):
        write_shards(tmp_path / "data" / name, problems("1", "2"), 2, "parquet")
    with pytest.raises(FileNotFoundError, match=r"4 files.*algebra/train-00000-of-00002\.parquet, .*geometry/train"):
        math_task.build("train", tmp_path / "data")
    assert len(math_task.build("train", tmp_path / "data" / "geometry")) == 2
    write_jsonl(problems("1"), "data/geometry/train.jsonl")
    with pytest.raises(FileNotFoundError, match="3 files"):
        math_task.build("train", tmp_path / "data" / "geometry")
    (tmp_path / "data" / "algebra" / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 files named train.*folder with .*all of its shards"):
        math_task.build("train", tmp_path / "data" / "algebra")


# ---- sciknoweval ----


@pytest.mark.parametrize("name", ["physics-test", "physics/test", "physics", "physics/physics"])
def test_domain_is_found_in_a_folder_below(tmp_path, write_jsonl, name):
    write_jsonl([{"broken": 1}], "data/another/test.jsonl")
    write_jsonl(questions(10), f"data/some/where/{name}.jsonl")
    assert len(load_task("sciknoweval:physics").build("test", tmp_path / "data")) == 1


def test_domain_in_several_folders_is_refused(tmp_path, write_jsonl):
    for folder in ("a", "b"):
        write_jsonl(questions(10), f"data/{folder}/physics-test.jsonl")
    message = r"physics in 2 folders \(a/physics-test\.jsonl, b/physics-test\.jsonl\); pass one of them"
    with pytest.raises(ValueError, match=message):
        load_task("sciknoweval:physics").build("test", tmp_path / "data")
    assert len(load_task("sciknoweval:physics").build("test", tmp_path / "data" / "b")) == 1
    write_jsonl(questions(20), "data/physics.jsonl")
    assert len(load_task("sciknoweval:physics").build("test", tmp_path / "data")) == 2


def test_second_version_of_a_domain_is_preferred(tmp_path, write_jsonl):
    for version, count in (("v1", 10), ("v2", 20)):
        write_jsonl(questions(count), f"hub/data/{version}/physics.jsonl")
    assert len(sciknoweval.build("all", tmp_path / "hub", domain="physics")) == 20
