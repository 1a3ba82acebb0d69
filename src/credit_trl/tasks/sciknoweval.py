"""SciKnowEval, Level 3: multiple-choice questions of biology, chemistry, physics and materials science.

Data: `hicai-zju/SciKnowEval` on the hub, the same rows as local files, or the prepared files that SDPO publishes.
Rewards follow the field's protocol (SDPO's, which the paper adopts): the text after the last `<answer>` up to
`</answer>`, stripped, equals the gold letter, case-sensitive. The feedback z is the correct answer.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.records import Row, RowError, Tally, accept, data_files, dataset_of, hub_rows, read_rows
from credit_trl.tasks.registry import TaskOption, batch_of

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
    """One domain's questions as conversational rows: `prompt` (system, user), `answer` (a letter), `task`, `id`.

    Args:
        split: `"train"` or `"test"` by the published rule (`split_indices`), or `"all"`.
        path: a file or folder; `None` loads from the hub. Two record forms are understood: the hub's (`question`,
            `choices`, `answerKey`, `type`, `domain`, `details`), and the prepared one (`prompt`, `system`, `answer`,
            `idx`). A prepared file that holds one part of the split already is recognised by its `idx` and must be
            the part asked for. In a folder, `<domain>-<split>.*` or `<domain>/<split>.*` is preferred, then
            `<domain>.*`, then every file below it.
        domain: one of `DOMAINS`; may be left out where `path` is a file.
        levels, types: which hub rows count, as the hub writes them; the rest is dropped and counted.
        hub: the hub repository, or a local folder in the hub's layout.
        on_malformed: `"raise"`, or `"drop"` to leave malformed rows out, each printed and counted. They keep their
            places in the split; where it cannot be told whether one has a place, the split cannot be told.

    Raises:
        ValueError: an unknown split or domain, no rows left, a file of the other split, or a dropped row that may
            have a place in it.
        RowError: a malformed row, by file, row and field.
    """
    if split not in SPLITS:
        raise ValueError(f"SciKnowEval has no split {split!r}; use one of {', '.join(SPLITS)}.")
    if domain is not None and domain not in DOMAINS:
        raise ValueError(f"SciKnowEval has no domain {domain!r}; use one of {', '.join(DOMAINS)}.")
    name = f"sciknoweval:{domain}" if domain else "sciknoweval"
    tally = Tally(f"{name} {split}")
    places = _Places()

    def convert(row: Row) -> tuple[int, dict[str, str]] | None:
        from_hub = not row.data.keys().isdisjoint(("question", "choices", "answerKey"))
        with places.losing(row):
            reason = _unwanted(row, domain, levels, types) if from_hub else _not_mcq(row)
            if reason is not None:
                places.are_all_rows = False
                return tally.drop(reason)
            slot = places.claim(row)
        return slot, _from_hub(row) if from_hub else _from_prepared(row)

    rows = places.watching(_rows(path, split, domain, hub))
    examples = dict(accept(rows, convert, tally, on_malformed))
    chosen = [slot for slot in places.of(split) if slot in examples]
    tally.drop("of the other split", len(examples) - len(chosen))
    tally.notes.update(examples[slot]["note"] for slot in chosen if "note" in examples[slot])
    prefix = f"{domain}-" if domain else ""
    return dataset_of([_conversation(examples[slot], name, f"{prefix}{slot}") for slot in chosen], tally)


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade one response: reward 1 where the answer given is the gold letter, else 0.

    The feedback is the correct answer whatever the response was, cut off or not: it does not depend on the rollout.

    Raises:
        ValueError: `answer` is not a letter.
    """
    if not isinstance(answer, str) or not re.fullmatch("[A-Z]", answer):
        raise ValueError(f"A SciKnowEval answer is one capital letter, got {answer!r}.")
    tagged = re.search(r"<answer>\s*[A-Z]\s*</answer>\s*\Z", response) is not None
    return Verdict(
        reward=float(given_answer(response) == answer),
        feedback=f"Correct answer: {answer}",
        metrics={"answer_format": float(tagged)},
    )


reward = batch_of(verify, "sciknoweval")


def given_answer(response: str) -> str:
    """The text after the last `<answer>` (or from the start) up to `</answer>` (or the end), stripped."""
    return response.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def split_indices(count: int, split: str) -> list[int]:
    """The published split rule: which of `count` positions belong to a part, in the order of the published files.

    With `p = numpy.random.default_rng(42).permutation(count)`, the first `ceil(0.1 count)` are the test rows and the
    rest the training rows (`datasets.Dataset.train_test_split(test_size=0.1, seed=42)`).
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
    """The files of a folder that hold a domain's part, see `build`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"No file or folder {folder}; pass a data file, or a folder that holds them.")
    files = {file.relative_to(folder).with_suffix("").as_posix(): file for file in data_files(folder)}
    wanted = ("train", "test") if split == "all" else (split,)
    parts = [_first(files, f"{domain}-{part}", f"{domain}/{part}", part) for part in wanted]
    if all(parts):
        return parts
    if full := _first(files, domain, f"{domain}/{domain}"):
        return [full]
    # Rows in the hub's form say their domain themselves; a file named after another domain need not be read.
    elsewhere = "|".join(one for one in DOMAINS if one != domain)
    aside = re.compile(rf"(.*/)?(({elsewhere})([-/].*)?|{domain}[-/](train|test))", re.IGNORECASE)
    others = [file for stem, file in files.items() if not aside.fullmatch(stem)]
    if not others:
        raise FileNotFoundError(
            f"{folder} has no {' and '.join(wanted)} part of {domain}: add {domain}-{wanted[0]}.jsonl or the full "
            f"{domain}.jsonl (it holds {', '.join(file.name for file in files.values()) or 'no data file'})."
        )
    return others


def _first(files: dict[str, Path], *stems: str) -> Path | None:
    return next((files[stem] for stem in stems if stem in files), None)


def _unwanted(row: Row, domain: str | None, levels: Sequence[str], types: Sequence[str]) -> str | None:
    """Why a hub record does not count, or `None` where it does."""
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
    """Where rows stand in the full set, of which the split is a permutation.

    Args:
        taken: every row that counts, malformed ones too, by its place.
        lost: rows so malformed that they may count or not, by the place that each has where all rows count.
        are_all_rows: no row was left out because it does not count.
        are_read_in_order: no row says its place itself.
    """

    taken: dict[int, Row] = field(default_factory=dict)
    lost: dict[int, Row] = field(default_factory=dict)
    are_all_rows: bool = True
    are_read_in_order: bool = True

    def watching(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, those among them that could not be read noted as lost."""
        for row in rows:
            if row.fault is not None:
                self._lose(row)
            yield row

    @contextlib.contextmanager
    def losing(self, row: Row) -> Iterator[None]:
        """Note a row as lost where it turns out malformed before it has a place."""
        try:
            yield
        except RowError:
            self._lose(row)
            raise

    def _lose(self, row: Row) -> None:
        self.lost[len(self.taken) + len(self.lost)] = row

    def claim(self, row: Row) -> int:
        """The row's place: its `idx` where it has one, else the next in reading order."""
        if "idx" in row.data:
            self.are_read_in_order = False
        slot = row.get("idx", int) if "idx" in row.data else len(self.taken) + len(self.lost)
        if slot in self.taken:
            earlier = self.taken[slot]
            raise row.error("idx", f"{slot} occurs before, in {earlier.source} row {earlier.number}")
        if slot < 0:
            raise row.error("idx", f"{slot} is negative")
        self.taken[slot] = row
        return slot

    def of(self, split: str) -> list[int]:
        """The places that belong to a split, in its order.

        Raises:
            ValueError: see `_part`; also where it cannot be told which place a lost row has.
        """
        if split == "all" or not self.lost:
            return _part(self.taken, split)
        if not (self.are_all_rows and self.are_read_in_order):
            first = next(iter(self.lost.values()))
            raise ValueError(
                f"{first.source}, row {first.number} was dropped as malformed, and whether and where it counts cannot "
                "be told; without it other rows would be in each part of the split. Mend the row, or pass split='all' "
                "to take the rows as they are."
            )
        return _part(self.taken | self.lost, split)


def _from_hub(row: Row) -> dict[str, str]:
    """A hub record's texts, in the wording of the published training files."""
    labels, texts = _choices(row)
    answer = row.text("answerKey")
    if answer not in labels:
        raise row.error("answerKey", f"{answer!r} is none of the options {', '.join(labels)}")
    options = "\n".join(f"{label}: {text}" for label, text in zip(labels, texts, strict=False))
    prompt = f"{row.text('question')}\n\n{options}\nPlease reason step by step."
    example = {"system": SYSTEM_PROMPT, "prompt": prompt, "answer": answer}
    if len(texts) > len(labels):
        # One such row exists (materials science); the published files cut it, and the split must not move.
        example["note"] = f"with {len(texts)} texts for {len(labels)} options, cut as published"
    return example


def _choices(row: Row) -> tuple[list[str], list[str]]:
    """The options' labels and texts: as many as the question's type says, two where it has two."""
    choices, kind = row.get("choices", (dict, list)), row.text("type")
    if isinstance(choices, list):  # a list of {label, text}, as some readers give it
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
    """The texts of a record of the published training files."""
    prompt, answer = row.text("prompt"), row.text("answer")
    if not re.fullmatch("[A-Z]", answer):
        raise row.error("answer", f"{answer!r} is not a capital letter")
    if not re.search(f"(?m)^{answer}: ", prompt):
        raise row.error("answer", f"{answer!r} is none of the prompt's options")
    return {"system": row.text("system"), "prompt": prompt, "answer": answer}


def _part(slots: Collection[int], split: str) -> list[int]:
    """The places that belong to a split, in its order.

    Raises:
        ValueError: the rows are neither complete nor the part asked for.
    """
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
                "the full file, or a folder that holds both; split='all' takes the rows as they are."
            )
    raise ValueError(
        f"The rows' `idx` are neither 0 to {len(slots) - 1} nor one part of the published split, so the split "
        "cannot be told: pass the full file, or split='all' to take the rows as they are."
    )


def _part_order(slots: set[int], part: str) -> list[int] | None:
    """The published order of a part, if these places are that part of a full set of some size."""
    size = len(slots)
    low, high = (10 * (size - 1), 10 * size) if part == "test" else (size, math.ceil(size / (1 - TEST_FRACTION)) + 1)
    for count in range(max(low, max(slots, default=-1) + 1), high + 1):
        held_out = math.ceil(TEST_FRACTION * count)
        if size == (held_out if part == "test" else count - held_out):
            order = split_indices(count, part)
            if set(order) == slots:
                return order
    return None


def _conversation(example: dict[str, str], task: str, identity: str) -> dict[str, Any]:
    turns = [{"role": "system", "content": example["system"]}, {"role": "user", "content": example["prompt"]}]
    return {"prompt": turns, "answer": example["answer"], "task": task, "id": identity}
