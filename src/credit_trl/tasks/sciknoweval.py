"""SciKnowEval, Level 3: multiple-choice questions of biology, chemistry, physics and materials science.

Data: `hicai-zju/SciKnowEval` on the hub, the same rows as local files, or the prepared files that SDPO publishes.
The reward follows SDPO's protocol, which the paper adopts: the stripped text between the last `<answer>` and
`</answer>` must equal the gold letter, case-sensitive. The feedback is the correct answer.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.printable import printable
from credit_trl.tasks.records import (
    Row,
    RowError,
    Tally,
    accept,
    data_files,
    dataset_of,
    hub_rows,
    read_rows,
    task_folder,
)
from credit_trl.tasks.task import TaskOption, batch_of

if TYPE_CHECKING:
    from datasets import Dataset

DOMAINS = ("biology", "chemistry", "material", "physics")
SPLITS = ("train", "test", "all")
OPTION = TaskOption(keyword="domain", values=DOMAINS)

HUB = "hicai-zju/SciKnowEval"
TEST_FRACTION = 0.1
SPLIT_SEED = 42

# The wording of the published training files; two-option questions carry it too.
SYSTEM_PROMPT = """
Given a question and four options, please select the right answer. Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>

For the answer, only output the letter corresponding to the correct option (A, B, C, or D), and nothing else. \
Do not restate the answer text. For example, if the answer is "A", just output:
<answer>
A
</answer>
"""


def build(
    split: str,
    path: str | Path | None = None,
    *,
    domain: str | None = None,
    levels: Sequence[str] = ("L3",),
    types: Sequence[str] = ("mcq-4-choices", "mcq-2-choices"),
    hub: str = HUB,
    on_malformed: str = "raise",
) -> Dataset:
    """Questions of a domain as conversational rows: `prompt` (system, user), `answer` (a letter), `task`, `id`.

    Args:
        split: `"train"` or `"test"` by the published rule (`split_indices`), or `"all"`.
        path: a file or folder; `None` loads from the hub. Records have the hub's form (`question`, `choices`,
            `answerKey`, `type`, `domain`, `details`) or the prepared one (`prompt`, `system`, `answer`, `idx`). A
            prepared file that contains one part of the split is recognized by its `idx` and must be the requested
            part. In a folder (its subfolder `sciknoweval` if it has one), `<domain>-<split>.*` or `<domain>/<split>.*`
            is preferred, then `<domain>.*`, then either of them in one folder below, then the files of a folder `v2`
            below (of the hub's repository), then all files below.
        domain: one of `DOMAINS`; optional if `path` is a file.
        levels, types: values of the hub rows to keep; other rows are dropped and counted.
        hub: hub repository, or a local folder in the hub's layout.
        on_malformed: `"raise"`, or `"drop"` to print, count and drop malformed rows. Dropped rows keep their places,
            so the split of the other rows does not change.

    Raises:
        ValueError: unknown split or domain, several folders with the domain, no rows left, a file of the other split,
            or a dropped row whose place in the split is unknown.
        RowError: a malformed row, with file, row and field.
    """
    if split not in SPLITS:
        raise ValueError(f"SciKnowEval has no split {split!r}; use one of {', '.join(SPLITS)}.")
    if domain is not None:
        OPTION.check(domain, "SciKnowEval")
    name = f"sciknoweval:{domain}" if domain else "sciknoweval"
    tally, places = Tally(f"{name} {split}"), _Places()

    def convert(row: Row) -> tuple[int, dict[str, str]] | None:
        with places.noting_lost(row):
            from_hub = not row.data.keys().isdisjoint(("question", "choices", "answerKey"))
            reason = _unwanted(row, domain, levels, types) if from_hub else _not_mcq(row)
            if reason is not None:
                places.all_kept = False
                return tally.drop(reason)
            slot = places.claim(row)
        return slot, _from_hub(row) if from_hub else _from_prepared(row)

    examples = dict(accept(_rows(path, split, domain, hub), convert, tally, on_malformed))
    chosen = [slot for slot in places.of(split) if slot in examples]
    tally.drop("of the other split", len(examples) - len(chosen))
    tally.notes.update(examples[slot]["note"] for slot in chosen if "note" in examples[slot])
    prefix = f"{domain}-" if domain else ""
    return dataset_of([_as_row(examples[slot], name, f"{prefix}{slot}") for slot in chosen], tally)


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade one response: reward 1 if the given answer is the gold letter, else 0.

    The feedback is the correct answer for every response, truncated or not.

    Raises:
        ValueError: `answer` is not a letter.
    """
    if not isinstance(answer, str) or not re.fullmatch("[A-Z]", answer):
        raise ValueError(f"A SciKnowEval answer must be one capital letter, got {answer!r}.")
    tagged = re.search(r"<answer>\s*([A-Z])\s*</answer>\s*\Z", response)
    wrong = tagged is not None and tagged[1] != answer
    return Verdict(
        reward=float(given_answer(response) == answer),
        feedback=f"Correct answer: {answer}",
        metrics={"answer_format": float(tagged is not None)},
        corrected=f"{response[: tagged.start(1)]}{answer}{response[tagged.end(1) :]}" if wrong else None,
    )


reward = batch_of(verify, "sciknoweval")


def given_answer(response: str) -> str:
    """Stripped text from the last `<answer>` (or the start) to `</answer>` (or the end)."""
    return response.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def split_indices(count: int, split: str) -> list[int]:
    """Positions out of `count` that belong to a split by the published rule, in the order of the published files.

    With `p = numpy.random.default_rng(42).permutation(count)`, the first `ceil(0.1 count)` entries are the test rows
    and the others the training rows, as in `datasets.Dataset.train_test_split(test_size=0.1, seed=42)`.
    """
    import numpy as np

    if split == "all":
        return list(range(count))
    order = np.random.default_rng(SPLIT_SEED).permutation(count).tolist()
    held_out = math.ceil(TEST_FRACTION * count)
    return order[:held_out] if split == "test" else order[held_out:]


def _rows(path: str | Path | None, split: str, domain: str | None, hub: str) -> Iterable[Row]:
    if path is not None and Path(path).is_file():
        return read_rows(path)
    if domain is None:
        raise ValueError(f"Name a domain: {', '.join(f'sciknoweval:{one}' for one in DOMAINS)}.")
    if path is None:
        return hub_rows(hub, "test")
    return (row for file in _files_of(Path(path), split, domain) for row in read_rows(file))


def _files_of(folder: Path, split: str, domain: str) -> list[Path]:
    """Files of a folder that contain a domain's part, see `build`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"No file or folder {folder}; pass a data file, or a folder of data files.")
    folder = task_folder(folder, "sciknoweval")
    files = {file.relative_to(folder).with_suffix("").as_posix(): file for file in data_files(folder, "sciknoweval")}
    wanted = ("train", "test") if split == "all" else (split,)
    parts, whole = [(f"{domain}-{part}", f"{domain}/{part}") for part in wanted], [(domain, f"{domain}/{domain}")]
    own = [(*stems, part) for stems, part in zip(parts, wanted, strict=True)]
    below = sorted({f"{parent}/" for stem in files for parent in PurePosixPath(stem).parents} - {"./"})
    for starts, named in ((("",), own), (("",), whole), (below, parts), (below, whole)):
        found = _matches(files, starts, named)
        if len(found) > 1:
            listed = ", ".join(printable(match[0].relative_to(folder).as_posix()) for match in found)
            raise ValueError(f"{folder} has {domain} in {len(found)} folders ({listed}); pass one of them.")
        if found:
            return found[0]
    # Rows in the hub's form name their domain; files named after another domain are not read.
    elsewhere = "|".join(one for one in DOMAINS if one != domain)
    aside = re.compile(rf"(.*/)?(({elsewhere})([-/].*)?|{domain}[-/](train|test))", re.IGNORECASE)
    others = {stem: file for stem, file in files.items() if not aside.fullmatch(stem)}
    # The hub's repository has two versions of the data set. Its configuration and the published split use the second.
    second = {stem: file for stem, file in others.items() if "v2" in stem.split("/")}
    if not others:
        raise FileNotFoundError(
            f"{folder} has no {' and '.join(wanted)} part of {domain}: add {domain}-{wanted[0]}.jsonl or the full "
            f"{domain}.jsonl (it contains {', '.join(file.name for file in files.values()) or 'no data file'})."
        )
    return list((second or others).values())


def _matches(files: dict[str, Path], starts: Iterable[str], named: Sequence[Sequence[str]]) -> list[list[Path]]:
    """Files with one stem of each group of `named` behind the same start, those of folders `v2` if any are there."""
    found: dict[str, list[Path]] = {}
    for start in starts:
        match = [next((files[start + stem] for stem in stems if start + stem in files), None) for stems in named]
        if all(match) and match not in found.values():
            found[start] = match
    second = [match for start, match in found.items() if "v2" in start.split("/")]
    return second or list(found.values())


def _unwanted(row: Row, domain: str | None, levels: Sequence[str], types: Sequence[str]) -> str | None:
    """Reason to drop a hub record, or `None`."""
    row_domain, level, kind = row.text("domain").lower(), row.get("details", dict).get("level"), row.text("type")
    if not isinstance(level, str):
        raise row.error("details.level", "missing")
    if domain is not None and row_domain != domain:
        return f"of domain {row_domain}"
    if level not in levels:
        return f"of level {level}"
    return None if kind in types else f"of type {kind}"


def _not_mcq(row: Row) -> str | None:
    return None if row.data.get("kind", "mcq") == "mcq" else f"of kind {row.data['kind']}"


@dataclass
class _Places:
    """Places of the rows in the full set, of which the split is a permutation.

    Args:
        taken: kept rows, malformed ones included, by place.
        lost: rows too malformed to decide whether they are kept, by the place they have if all rows are kept.
        all_kept: whether no row was dropped for its domain, level, type or kind.
        in_order: whether no row has an `idx`, so that places follow the reading order.
    """

    taken: dict[int, Row] = field(default_factory=dict)
    lost: dict[int, Row] = field(default_factory=dict)
    all_kept: bool = True
    in_order: bool = True

    @contextlib.contextmanager
    def noting_lost(self, row: Row) -> Iterator[None]:
        """Note the row as lost if it turns out malformed before it has a place."""
        try:
            yield
        except RowError:
            self.lost[len(self.taken) + len(self.lost)] = row
            raise

    def claim(self, row: Row) -> int:
        """Place of a row: its `idx` if it has one, else the next place in reading order."""
        slot = len(self.taken) + len(self.lost)
        if "idx" in row.data:
            self.in_order = False
            slot = row.get("idx", int)
        if slot in self.taken:
            earlier = self.taken[slot]
            raise row.error("idx", f"{slot} is also the idx of {earlier.source}, row {earlier.number}")
        if slot < 0:
            raise row.error("idx", f"{slot} is negative")
        self.taken[slot] = row
        return slot

    def of(self, split: str) -> list[int]:
        """Places that belong to a split, in its order; an error where a lost row has an unknown place."""
        if split != "all" and self.lost and not (self.all_kept and self.in_order):
            first = next(iter(self.lost.values()))
            raise ValueError(
                f"{first.source}, row {first.number} was dropped as malformed, and its place in the split is unknown. "
                "Without it the split of the other rows would change. Correct the row, or pass split='all' to load "
                "the rows without a split."
            )
        return _part(self.taken if split == "all" else self.taken | self.lost, split)


def _from_hub(row: Row) -> dict[str, str]:
    """Texts of a hub record, in the wording of the published training files."""
    labels, texts = _choices(row)
    answer = row.text("answerKey")
    if answer not in labels:
        raise row.error("answerKey", f"{answer!r} is none of the options {', '.join(labels)}")
    options = "\n".join(f"{label}: {text}" for label, text in zip(labels, texts, strict=False))
    prompt = f"{row.text('question')}\n\n{options}\nPlease reason step by step."
    example = {"system": SYSTEM_PROMPT, "prompt": prompt, "answer": answer}
    if len(texts) > len(labels):
        # One such row exists (materials science). The published files cut it, and the split must not change.
        example["note"] = f"with {len(texts)} texts for {len(labels)} options, cut as published"
    return example


def _choices(row: Row) -> tuple[list[str], list[str]]:
    """Labels and texts of the options, as many as the type of the question requires."""
    choices, kind = row.get("choices", (dict, list)), row.text("type")
    if isinstance(choices, list):  # list of {label, text}, from some readers
        choices = {key: [one.get(key) for one in choices if isinstance(one, dict)] for key in ("label", "text")}
    labels, texts = choices.get("label"), choices.get("text")
    for name, values in (("choices.label", labels), ("choices.text", texts)):
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise row.error(name, "not a list of texts")
    if not all(re.fullmatch("[A-Z]", label) for label in labels) or len(set(labels)) != len(labels):
        raise row.error("choices.label", f"{labels} are not different capital letters")
    if len(texts) < len(labels):
        raise row.error("choices.text", f"{len(texts)} texts for {len(labels)} labels")
    expected = re.fullmatch(r"mcq-(\d+)-choices", kind)
    if expected and len(labels) != int(expected[1]):
        raise row.error("choices.label", f"{len(labels)} options in a question of type {kind}")
    return labels, texts


def _from_prepared(row: Row) -> dict[str, str]:
    """Texts of a record of the published training files."""
    prompt, answer = row.text("prompt"), row.text("answer")
    if not re.fullmatch("[A-Z]", answer):
        raise row.error("answer", f"{answer!r} is not a capital letter")
    if not re.search(f"(?m)^{answer}: ", prompt):
        raise row.error("answer", f"{answer!r} is none of the prompt's options")
    return {"system": row.text("system"), "prompt": prompt, "answer": answer}


def _part(slots: Collection[int], split: str) -> list[int]:
    """Places that belong to a split, in its order; an error where the rows are neither all rows nor that part."""
    if split == "all":
        return sorted(slots)
    if set(slots) == set(range(len(slots))):
        return split_indices(len(slots), split)
    for part in ("train", "test"):
        order = _part_order(set(slots), part)
        if order and part == split:
            return order
        if order:
            raise ValueError(
                f"This file is the {part} part of SciKnowEval's split, not the {split} part: pass the {split} file, "
                "the full file, or a folder that holds both; split='all' loads the rows without a split."
            )
    raise ValueError(
        f"The rows' `idx` are neither 0 to {len(slots) - 1} nor one part of the published split, so their split is "
        "unknown: pass the full file, or split='all' to load the rows without a split."
    )


def _part_order(slots: set[int], part: str) -> list[int] | None:
    """Published order of a part, if these places are that part of a full set of some size."""
    size = len(slots)
    low, high = (10 * (size - 1), 10 * size) if part == "test" else (size, math.ceil(size / (1 - TEST_FRACTION)) + 1)
    for count in range(max(low, max(slots, default=-1) + 1), high + 1):
        held_out = math.ceil(TEST_FRACTION * count)
        if size == (held_out if part == "test" else count - held_out):
            order = split_indices(count, part)
            if set(order) == slots:
                return order
    return None


def _as_row(example: dict[str, str], task: str, identity: str) -> dict[str, Any]:
    turns = [{"role": "system", "content": example["system"]}, {"role": "user", "content": example["prompt"]}]
    return {"prompt": turns, "answer": example["answer"], "task": task, "id": identity}
