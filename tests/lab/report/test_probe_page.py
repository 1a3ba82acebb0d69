"""The page of a probe: the advice, four numbers and one bar an arm on one screen; answers are text."""

import pytest
from datasets import Dataset

from credit_trl import Verdict
from credit_trl.lab.analysis.probing import ProbeSettings, probe
from credit_trl.lab.analysis.targets import Arm
from credit_trl.lab.report.write import write_html
from credit_trl.tasks import Task

SETTINGS = ProbeSettings(prompts=4, arms=(Arm("SDPO", 0.0), Arm("guide 1.5", 1.5, "guide")))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_page_shows_hostile_answers_as_text(make_trainer, tmp_path, open_page, scheme, width):
    hostile = "<img src=x onerror=alert(1)>"
    rows = Dataset.from_dict({"prompt": [f"{hostile} {i}?" for i in range(4)], "answer": ["1"] * 4})
    graded = Task.from_dataset(
        rows, lambda completions, **columns: [Verdict(float(len(c) % 2), "no") for c in completions], hostile
    )
    document = probe(make_trainer(lambda completions, **columns: [0.0] * len(completions), rows), graded, SETTINGS)
    write_html({"title": document["title"], "probe": document}, tmp_path / "probe.html")
    page = open_page(tmp_path / "probe.html", width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.locator(".advice").inner_text() == document["advice"]["sentence"]
    assert page.locator(".probed svg").count() == 2
    assert page.locator("img").count() == 0
    page.locator("#probe summary").nth(1).click()
    assert hostile in page.locator("#probe details .text").first.inner_text()
