from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.tasks import load_task, sciknoweval
from credit_trl.tasks.records import RowError


def published(shared_data, domain: str, part: str) -> list[dict]:
    with open(shared_data / "sciknoweval" / f"{domain}-{part}.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def hub_row(number: int = 0, **changes) -> dict:
    row = {
        "prompt": {"default": "Given a question and four options, please select the right answer."},
        "question": f"Which is number {number}?",
        "choices": {"text": ["one", "two", "three", "four"], "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[number % 4],
        "type": "mcq-4-choices",
        "domain": "Physics",
        "details": {"level": "L3", "task": "t", "subtask": "s", "source": "own"},
        "answer": "",
    }
    return row | changes


def two_option_row(number: int) -> dict:
    return hub_row(
        number, type="mcq-2-choices", choices={"text": ["yes", "no"], "label": ["A", "B"]}, answerKey="AB"[number % 2]
    )


# ---- the split ----


@pytest.mark.parametrize("domain", ["physics", "biology"])
def test_split_of_the_full_file_equals_published_parts(shared_data, write_jsonl, domain):
    parts = {part: published(shared_data, domain, part) for part in ("train", "test")}
    full = sorted(parts["train"] + parts["test"], key=lambda row: row["idx"])
    assert [row["idx"] for row in full] == list(range(len(full)))
    path = write_jsonl(full)
    for part, rows in parts.items():
        built = sciknoweval.build(part, path, domain=domain)
        assert built["id"] == [f"{domain}-{row['idx']}" for row in rows]  # the published order, too
        assert [turns[1]["content"] for turns in built["prompt"]] == [row["prompt"] for row in rows]
        assert built["answer"] == [row["answer"] for row in rows]


@pytest.mark.parametrize("domain", ["physics", "biology"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_published_part_is_recognized_and_kept_whole(shared_data, domain, part):
    from_file = sciknoweval.build(part, shared_data / "sciknoweval" / f"{domain}-{part}.jsonl", domain=domain)
    from_folder = load_task(f"sciknoweval:{domain}").build(part, shared_data / "sciknoweval")
    assert from_file["id"] == from_folder["id"]
    assert sorted(int(name.split("-")[1]) for name in from_file["id"]) == sorted(
        row["idx"] for row in published(shared_data, domain, part)
    )


@pytest.mark.parametrize("domain", ["chemistry", "material"])
def test_train_parts_follow_the_same_rule(shared_data, domain):
    rows = published(shared_data, domain, "train")
    built = load_task(f"sciknoweval:{domain}").build("train", shared_data / "sciknoweval")
    assert built["id"] == [f"{domain}-{row['idx']}" for row in rows]


@pytest.mark.parametrize("count", [1, 5, 10, 11, 99, 800])
def test_split_rule_equals_train_test_split(count):
    rows = Dataset.from_dict({"position": list(range(count))})
    if count == 1:
        assert sciknoweval.split_indices(1, "test") == [0]
        return
    expected = rows.train_test_split(test_size=0.1, seed=42)
    for part in ("train", "test"):
        assert sciknoweval.split_indices(count, part) == expected[part]["position"]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 400))
def test_train_and_test_parts_are_a_partition(count):
    train, test = sciknoweval.split_indices(count, "train"), sciknoweval.split_indices(count, "test")
    assert sorted(train + test) == list(range(count))
    assert len(test) == -(-count // 10)


def test_test_split_of_the_train_file_raises(shared_data):
    path = shared_data / "sciknoweval" / "physics-train.jsonl"
    with pytest.raises(ValueError, match=r"train part .* not the test part.*folder that holds both"):
        sciknoweval.build("test", path, domain="physics")


def test_rows_of_no_known_split_need_split_all(shared_data, write_jsonl):
    path = write_jsonl(published(shared_data, "physics", "train")[:300])
    with pytest.raises(ValueError, match="split='all'"):
        sciknoweval.build("train", path, domain="physics")
    assert len(sciknoweval.build("all", path, domain="physics")) == 300


@pytest.mark.timeout(20)
@pytest.mark.parametrize("split", ["train", "test"])
def test_large_file_of_no_known_split_raises_in_time(write_jsonl, split):
    row = {"kind": "mcq", "answer": "A", "prompt": "Which?\n\nA: one\nB: two", "system": "Choose."}
    path = write_jsonl([row | {"idx": 2 * number} for number in range(8_000)])
    with pytest.raises(ValueError, match="split='all'"):
        sciknoweval.build(split, path, domain="physics")


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 400), part=st.sampled_from(["train", "test"]))
def test_part_of_any_full_set_is_recognized(count, part):
    order = sciknoweval.split_indices(count, part)
    found = sciknoweval._part_order(set(order), part)
    assert set(found or ()) == set(order)


PUBLISHED = [("biology", "train"), ("biology", "test"), ("chemistry", "train"), ("material", "train")]


@pytest.mark.parametrize(("domain", "part"), [*PUBLISHED, ("physics", "train"), ("physics", "test")])
def test_hashes_in_the_docs_match_the_published_files(shared_data, domain, part):
    built = load_task(f"sciknoweval:{domain}").build(part, shared_data / "sciknoweval")
    digest = built.info.description.split("sha256 ")[1]
    page = Path(__file__).parents[2].joinpath("docs", "tasks.md").read_text(encoding="utf-8")
    [line] = [line for line in page.split("\n") if line.startswith(f"| `sciknoweval:{domain}` | `")]
    assert f"`{digest[:16]}` ({len(built)})" == line.split("|")[2 if part == "train" else 3].strip()


# ---- building ----


def test_row_is_a_conversation_with_the_system_prompt(shared_data):
    row = load_task("sciknoweval:physics").build("test", shared_data / "sciknoweval")[0]
    source = published(shared_data, "physics", "test")[0]
    assert row["prompt"] == [
        {"role": "system", "content": source["system"]},
        {"role": "user", "content": source["prompt"]},
    ]
    assert (row["answer"], row["task"], row["id"]) == (
        source["answer"],
        "sciknoweval:physics",
        f"physics-{source['idx']}",
    )


def test_hub_records_have_the_published_wording(shared_data, write_jsonl):
    source = published(shared_data, "physics", "test")[0]
    question, _, options = source["prompt"].removesuffix("\nPlease reason step by step.").rpartition("\n\n")
    labels, texts = zip(*(line.split(": ", 1) for line in options.split("\n")), strict=True)
    row = hub_row(question=question, choices={"text": list(texts), "label": list(labels)}, answerKey=source["answer"])
    built = sciknoweval.build("all", write_jsonl([row]), domain="physics")[0]
    assert built["prompt"] == [
        {"role": "system", "content": source["system"]},
        {"role": "user", "content": source["prompt"]},
    ]


def test_two_option_questions_show_two_options(shared_data, write_jsonl):
    built = sciknoweval.build("all", write_jsonl([two_option_row(i) for i in range(4)]), domain="physics")
    for row in built:
        assert "A: yes\nB: no\nPlease" in row["prompt"][1]["content"]
        assert "\nC: " not in row["prompt"][1]["content"]
    biology = load_task("sciknoweval:biology").build("all", shared_data / "sciknoweval")
    assert sum("\nC: " not in turns[1]["content"] for turns in biology["prompt"]) == 200


def test_filtered_rows_are_counted_by_reason(write_jsonl, capsys):
    rows = [hub_row(i) for i in range(20)]
    rows += [hub_row(details={"level": "L1"})] * 3
    rows += [hub_row(type="true_or_false", choices={"text": [], "label": []}, answerKey="")] * 2
    rows += [hub_row(domain="Biology")]
    built = sciknoweval.build("train", write_jsonl(rows), domain="physics")
    line = capsys.readouterr().err
    assert len(built) == 18
    assert line == built.info.description + "\n"
    assert "26 read, 18 kept, 8 dropped" in line
    for reason in ("1 of domain biology", "3 of level L1", "2 of type true_or_false", "2 of the other split"):
        assert reason in line
    assert len(line.split("sha256 ")[1].strip()) == 64


def test_content_hash_depends_on_content_and_order(write_jsonl):
    def digest(rows):
        return sciknoweval.build("all", write_jsonl(rows), domain="physics").info.description.split("sha256 ")[1]

    rows = [hub_row(i) for i in range(6)]
    assert digest(rows) == digest(rows)
    assert digest(rows) != digest(rows[::-1])
    assert digest(rows) != digest([*rows[:5], hub_row(5, answerKey="D")])


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_file_formats_give_the_same_rows(tmp_path, write_jsonl, suffix):
    rows = [hub_row(i) for i in range(12)]
    path = tmp_path / f"physics.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif suffix == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path = write_jsonl(rows, path.name)
    reference = sciknoweval.build("train", write_jsonl(rows, "reference.jsonl"), domain="physics")
    assert sciknoweval.build("train", path, domain="physics")[:] == reference[:]


def test_hub_layout_is_loaded_without_a_path(tmp_path, write_jsonl):
    rows = [hub_row(i) for i in range(10)] + [two_option_row(i) for i in range(10)]
    folder = tmp_path / "repository"
    write_jsonl(rows, "repository/test.jsonl")
    built = sciknoweval.build("train", domain="physics", hub=str(folder))
    assert built[:] == sciknoweval.build("train", write_jsonl(rows), domain="physics")[:]


def test_unreachable_hub_error_suggests_a_path(tmp_path):
    with pytest.raises(ValueError, match="pass `path=`"):
        sciknoweval.build("train", domain="physics", hub=str(tmp_path / "nowhere"))


def test_hub_repository_folder_is_read_by_domain(tmp_path, write_jsonl):
    write_jsonl([hub_row(i) for i in range(10)], "raw/Physics/L3/calculation.jsonl")
    write_jsonl([hub_row(details={"level": "L1"})], "raw/Physics/L1/literature.jsonl")
    write_jsonl([{"broken": 1}], "raw/Biology/L3/never_read.jsonl")
    assert len(load_task("sciknoweval:physics").build("all", tmp_path / "raw")) == 10


def test_copy_of_the_hub_is_read_in_its_second_version(tmp_path, write_jsonl):
    write_jsonl([hub_row(i) for i in range(12)], "hub/data/v1/sciknoweval_test_v1.jsonl")
    write_jsonl([hub_row(i) for i in range(10)], "hub/data/v2/sciknoweval_test_v2.jsonl")
    assert len(load_task("sciknoweval:physics").build("all", tmp_path / "hub")) == 10


def test_published_folder_has_one_file_per_part(tmp_path, shared_data, write_jsonl):
    for part in ("train", "test"):
        write_jsonl(published(shared_data, "physics", part), f"data/physics/{part}.json")
    for folder in (tmp_path / "data", tmp_path / "data" / "physics"):
        assert len(load_task("sciknoweval:physics").build("test", folder)) == 80
        assert len(load_task("sciknoweval:physics").build("all", folder)) == 800
    with pytest.raises(FileNotFoundError, match=r"biology-train\.jsonl"):
        load_task("sciknoweval:biology").build("train", tmp_path / "data")


def test_missing_part_error_names_the_file_to_add(shared_data):
    with pytest.raises(FileNotFoundError, match=r"add chemistry-test\.jsonl or the full chemistry\.jsonl"):
        load_task("sciknoweval:chemistry").build("test", shared_data / "sciknoweval")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "validation", "domain": "physics"}, "train, test, all"),
        ({"split": "train", "domain": "alchemy"}, "biology, chemistry, material, physics"),
        ({"split": "train"}, "sciknoweval:physics"),
        ({"split": "train", "domain": "physics", "path": "no/such/folder"}, "pass a data file, or a folder"),
    ],
)
def test_invalid_arguments_raise_with_valid_ones(arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        sciknoweval.build(**arguments)


# ---- malformed rows ----

PREPARED = {
    "idx": 1,
    "kind": "mcq",
    "dataset": "sciknoweval",
    "answer": "B",
    "prompt": "Q\n\nA: x\nB: y\nPlease reason step by step.",
    "system": "s",
}
MALFORMED = {
    "no choices": (hub_row(choices=None), "choices"),
    "choices a text": (hub_row(choices="A: x"), "choices"),
    "labels missing": (hub_row(choices={"text": ["x", "y"]}), "choices.label"),
    "a label twice": (hub_row(choices={"text": list("wxyz"), "label": list("ABCC")}), "choices.label"),
    "a label in lower case": (hub_row(choices={"text": list("wxyz"), "label": list("abcd")}), "choices.label"),
    "a number among the texts": (hub_row(choices={"text": ["w", "x", 3, "z"], "label": list("ABCD")}), "choices.text"),
    "fewer texts than labels": (hub_row(choices={"text": list("wxy"), "label": list("ABCD")}), "choices.text"),
    "two options in a four-option type": (hub_row(choices={"text": ["x", "y"], "label": ["A", "B"]}), "choices.label"),
    "gold is no option": (hub_row(answerKey="E"), "answerKey"),
    "gold in lower case": (hub_row(answerKey="b"), "answerKey"),
    "gold missing": ({key: value for key, value in hub_row().items() if key != "answerKey"}, "answerKey"),
    "blank question": (hub_row(question="  "), "question"),
    "no level": (hub_row(details={"task": "t"}), "details.level"),
    "details a text": (hub_row(details="L3"), "details"),
    "no domain": (hub_row(domain=None), "domain"),
    "prepared, gold not in the prompt": (PREPARED | {"answer": "D"}, "answer"),
    "prepared, gold a word": (PREPARED | {"answer": "yes"}, "answer"),
    "prepared, no system": (PREPARED | {"system": None}, "system"),
    "prepared, idx a text": (PREPARED | {"idx": "1"}, "idx"),
    "prepared, idx true": (PREPARED | {"idx": True}, "idx"),
    "prepared, idx twice": (PREPARED | {"idx": 0}, "idx"),
    "prepared, idx negative": (PREPARED | {"idx": -1}, "idx"),
}


@pytest.mark.parametrize(("row", "field"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_row_raises_with_file_row_and_field(write_jsonl, row, field):
    good = PREPARED | {"idx": 0} if "kind" in row else hub_row()
    path = write_jsonl([good, row], "physics.jsonl")
    with pytest.raises(RowError, match=r"physics\.jsonl, row 2, field ") as caught:
        sciknoweval.build("all", path, domain="physics")
    assert (caught.value.row, caught.value.field) == (2, field)


def test_dropped_malformed_rows_do_not_change_the_split(write_jsonl, capsys):
    rows = [hub_row(i) for i in range(40)]
    whole = sciknoweval.build("train", write_jsonl(rows), domain="physics")
    broken = int(whole["id"][7].split("-")[1])
    rows[broken] = hub_row(answerKey="E")
    capsys.readouterr()
    path = write_jsonl(rows, "broken.jsonl")
    rest = sciknoweval.build("train", path, domain="physics", on_malformed="drop")
    printed = capsys.readouterr().err
    assert rest["id"] == [name for name in whole["id"] if name != f"physics-{broken}"]
    assert f"dropped: {path}, row {broken + 1}, field 'answerKey'" in printed
    assert "1 malformed in 'answerKey'" in printed


UNREADABLE = {
    "no JSON": "{",
    "no object": "[]",
    "no level": json.dumps(hub_row(details={})),
    "no domain": json.dumps({key: value for key, value in hub_row().items() if key != "domain"}),
    "no type": json.dumps(hub_row(type=None)),
}


def write_with_one_replaced(path, rows, place, line):
    lines = [json.dumps(row) for row in rows]
    lines[place] = line
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("line", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_row_keeps_its_place_if_all_rows_count(tmp_path, write_jsonl, split, line):
    rows = [hub_row(i) for i in range(40)]
    whole = sciknoweval.build(split, write_jsonl(rows), domain="physics")
    broken = int(whole["id"][1].split("-")[1])
    path = write_with_one_replaced(tmp_path / "broken.jsonl", rows, broken, line)
    rest = sciknoweval.build(split, path, domain="physics", on_malformed="drop")
    kept = [place for place, name in enumerate(whole["id"]) if name != f"physics-{broken}"]
    assert rest[:] == whole.select(kept)[:]


@pytest.mark.parametrize("line", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize(
    "rows",
    [
        [*(hub_row(i) for i in range(40)), hub_row(details={"level": "L1"})],
        [hub_row(i, idx=i) for i in range(41)],
    ],
    ids=["filtered rows", "rows with an idx"],
)
def test_unreadable_row_with_unknown_place_raises(tmp_path, rows, line):
    path = write_with_one_replaced(tmp_path / "broken.jsonl", rows, 39, line)
    for split in ("train", "test"):
        with pytest.raises(ValueError, match=r"broken\.jsonl, row 40 was dropped .* split='all'"):
            sciknoweval.build(split, path, domain="physics", on_malformed="drop")
    assert len(sciknoweval.build("all", path, domain="physics", on_malformed="drop")) >= 39


def test_surplus_option_texts_are_cut_and_noted(write_jsonl, capsys):
    row = hub_row(choices={"text": ["remark", "w", "x", "y", "z"], "label": list("ABCD")})
    built = sciknoweval.build("all", write_jsonl([row]), domain="physics")
    assert "A: remark\nB: w\nC: x\nD: y\nPlease" in built[0]["prompt"][1]["content"]
    assert "1 kept (1 with 5 texts for 4 options, cut as published)" in capsys.readouterr().err


# ---- the verifier ----

ADVERSARIAL = {  # reason: (response, gold, reward)
    "tagged": ("<reasoning>r</reasoning><answer>B</answer>", "B", 1),
    "tagged on its own line": ("<answer>\nB\n</answer>", "B", 1),
    "the wrong letter": ("<answer>A</answer>", "B", 0),
    "the last of several tags counts, right": ("<answer>A</answer> no: <answer>B</answer>", "B", 1),
    "the last of several tags counts, wrong": ("<answer>B</answer> no: <answer>A</answer>", "B", 0),
    "lower case": ("<answer>b</answer>", "B", 0),
    "bare letter": ("B", "B", 1),
    "bare letter in white space": (" \n\tB\r\n", "B", 1),
    "bare letter with a full stop": ("B.", "B", 0),
    "bare letter in a sentence": ("The answer is B", "B", 0),
    "letter in parentheses": ("<answer>(B)</answer>", "B", 0),
    "letter with a colon": ("<answer>B:</answer>", "B", 0),
    "option text restated": ("<answer>B: two</answer>", "B", 0),
    "two letters": ("<answer>AB</answer>", "B", 0),
    "two letters with a comma": ("<answer>A, B</answer>", "B", 0),
    "every letter": ("<answer>A B C D</answer>", "B", 0),
    "cyrillic look-alike": ("<answer>В</answer>", "B", 0),
    "greek look-alike": ("<answer>Β</answer>", "B", 0),
    "full-width look-alike": ("<answer>Ｂ</answer>", "B", 0),
    "mathematical bold": ("<answer>𝐁</answer>", "B", 0),
    "letter with a combining mark": ("<answer>B\u0301</answer>", "B", 0),
    "no-break space around the letter": ("<answer>\u00a0B\u00a0</answer>", "B", 1),
    "zero-width space beside the letter": ("<answer>\u200bB</answer>", "B", 0),
    "byte-order mark before the letter": ("<answer>\ufeffB</answer>", "B", 0),
    "CRLF around the letter": ("<answer>\r\nB\r\n</answer>\r\n", "B", 1),
    "unclosed tag": ("so <answer>B", "B", 1),
    "unclosed tag and more": ("<answer>B because", "B", 0),
    "closing tag only, letter before it": ("B</answer>", "B", 1),
    "closing tag only, sentence before it": ("So B</answer>", "B", 0),
    "closed twice": ("<answer>B</answer></answer>", "B", 1),
    "nested opening tags": ("<answer><answer>B</answer></answer>", "B", 1),
    "opened again after the answer": ("<answer>B</answer><answer>", "B", 0),
    "letter after the closing tag": ("<answer></answer>B", "B", 0),
    "upper-case tag": ("<ANSWER>B</ANSWER>", "B", 0),
    "tag with a space": ("< answer >B</ answer >", "B", 0),
    "tag with an attribute": ('<answer type="letter">B</answer>', "B", 0),
    "markdown bold": ("<answer>**B**</answer>", "B", 0),
    "code span": ("<answer>`B`</answer>", "B", 0),
    "boxed": ("\\boxed{B}", "B", 0),
    "quoted": ('<answer>"B"</answer>', "B", 0),
    "json": ('{"answer": "B"}', "B", 0),
    "html entity": ("<answer>&#66;</answer>", "B", 0),
    "NaN": ("<answer>NaN</answer>", "B", 0),
    "null byte beside the letter": ("<answer>B\x00</answer>", "B", 0),
    "empty": ("", "B", 0),
    "empty tag": ("<answer></answer>", "B", 0),
    "white space only": (" \n ", "B", 0),
    "the prompt's own format repeated": ("<answer>\n...\n</answer>", "B", 0),
    "huge text before": ("x" * 1_000_000 + "<answer>B</answer>", "B", 1),
    "huge text after": ("<answer>B</answer>" + "x" * 1_000_000, "B", 1),
    "huge answer": ("<answer>" + "B" * 1_000_000 + "</answer>", "B", 0),
    "a hundred thousand tags": ("<answer>A</answer>" * 100_000 + "<answer>B</answer>", "B", 1),
    "option of another question": ("<answer>E</answer>", "B", 0),
    "feedback parroted": ("Correct answer: B", "B", 0),
    "the answer inside the reasoning only": ("<reasoning>B</reasoning>", "B", 0),
}


@pytest.mark.parametrize(("response", "gold", "reward"), ADVERSARIAL.values(), ids=ADVERSARIAL)
@pytest.mark.parametrize("truncated", [False, True])
def test_verdicts_follow_the_field_protocol(response, gold, reward, truncated):
    verdict = sciknoweval.verify(response, gold, truncated=truncated)
    assert verdict.reward == reward
    assert verdict.feedback == "Correct answer: B"  # the paper's words, whatever the response


@given(before=st.text(), letter=st.sampled_from("ABCD"), gold=st.sampled_from("ABCD"), after=st.text())
def test_last_tag_decides_whatever_surrounds_it(before, letter, gold, after):
    after = after.replace("<answer>", "")
    verdict = sciknoweval.verify(f"{before}<answer>{letter}</answer>{after}", gold)
    assert verdict.reward == (letter == gold)


@given(response=st.text(alphabet="ABCDabcd<>/answer \n", max_size=40), gold=st.sampled_from("ABCD"))
def test_verify_agrees_with_a_character_level_reading(response, gold):
    start = max((i + 8 for i in range(len(response)) if response.startswith("<answer>", i)), default=0)
    end = next((i for i in range(start, len(response)) if response.startswith("</answer>", i)), len(response))
    assert sciknoweval.verify(response, gold).reward == (response[start:end].strip() == gold)


@pytest.mark.parametrize(
    ("response", "tagged"), [("<answer>A</answer>\n", 1.0), ("A", 0.0), ("<answer>A</answer> and more", 0.0)]
)
def test_format_is_a_metric_and_not_rewarded(response, tagged):
    verdict = sciknoweval.verify(response, "B")
    assert verdict.metrics == {"answer_format": tagged}
    assert verdict.reward == 0


@pytest.mark.parametrize("answer", [None, "", "b", "AB", 2])
def test_gold_answer_that_is_not_a_letter_raises(answer):
    with pytest.raises(ValueError, match="one capital letter"):
        sciknoweval.verify("<answer>B</answer>", answer)
