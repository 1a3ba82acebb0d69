"""The HTML report: self-contained, escaped, and rendered without errors in light and dark by Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from credit_trl.cli import credit_compare
from credit_trl.lab.comparison import compare, figures, write_report
from credit_trl.lab.comparison.figures import THEMES, ablation_figure
from synthetic_runs import writer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> $\\frac$'
PROMPTS = [f"q{i}" for i in range(30)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run = writer(root)
    rng = np.random.default_rng(0)
    for arm, gain in {"GRPO": 0.2, "SDPO": 0.35, "CREDIT λ=0.1 C=1": 0.4, HOSTILE: 0.1}.items():
        for seed in (1, 2, 3):
            by_step = {
                step: {p: float(np.clip(0.2 + gain * step / 20 + rng.normal(0, 0.1), 0, 1)) for p in PROMPTS}
                for step in (0, 5, 10, 15, 20)
            }
            log = [
                {
                    "step": step,
                    "entropy": 1.0 - gain * step / 20 + 0.02 * seed,
                    "completions/mean_length": 20 + 10 * gain * step,
                    "credit/advantage_mean": -0.1 * gain,
                    "credit/advantage_std": 0.5 + 0.1 * seed,
                    "credit/s_mean": 0.2 * (1 - step / 30),
                }
                for step in range(1, 21)
            ]
            folder = f"{['GRPO', 'SDPO', 'CREDIT λ=0.1 C=1', HOSTILE].index(arm)}-{seed}"
            write_run(folder, by_step, arm=arm, seed=seed, log=log)
    return root


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report(compare([runs], targets=[0.4]), folder, title="Methods & <arms>")


class Elements(HTMLParser):
    """Every element of a page with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_page_is_self_contained_and_escapes_text_of_runs(page):
    text = page.read_text()
    elements = Elements(text).found
    sources = [a[name] for _, a in elements for name in ("src", "href", "srcset", "action", "data") if name in a]
    assert len(sources) == 5
    assert all(source.startswith("data:") for source in sources)
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    assert [tag for tag, _ in elements].count("script") == 1
    assert "url(" not in text
    assert "@import" not in text
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;" in text
    assert "Methods &amp; &lt;arms&gt;" in text
    assert "default-src 'none'" in text


def test_json_markdown_and_page_have_the_same_numbers(page, runs):
    result = compare([runs], targets=[0.4])
    numbers = json.loads((page.parent / "comparison.json").read_text())
    for row in numbers["scores"]:
        interval = result.cells[row["arm"], row["domain"], row["when"]].interval
        assert (row["mean"], row["low"], row["high"]) == interval
        assert f"{100 * interval.mean:.1f}" in page.read_text()
    tables = (page.parent / "tables.md").read_text()
    assert "Final score" in tables
    assert "Best during training" in tables
    for name in ("scores", "curves"):
        light, dark = (matplotlib.image.imread(page.parent / f"{name}-{t.name}.png") for t in THEMES)
        assert light.shape == dark.shape
        assert light[2, 2, :3].mean() > 0.95
        assert dark[2, 2, :3].mean() < 0.15


def test_page_lists_unfinished_runs_and_differing_settings(write_run, tmp_path):
    for arm, temperature in (("A", 0.6), ("B", 1.0)):
        write_run(arm, {0: {"q": 0.5}, 5: {"q": 1.0}}, arm=arm, settings={"temperature": temperature})
    write_run("C", {5: {"q": 1.0}}, arm="C", finished=False)
    text = write_report(compare([tmp_path / "runs"]), tmp_path / "report").read_text()
    before_the_tables = text.partition("<table")[0]
    for remark in ("letters, temperature: 0.6 in", "1.0 in", f"has not ended: {tmp_path / 'runs' / 'C'}"):
        assert remark in before_the_tables


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast_ratio(one: str, other: str) -> float:
    """Contrast ratio of WCAG, which requires 4.5 for text."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_has_enough_contrast_in_both_themes(page):
    palettes = re.findall(r"color-scheme: (light|dark); ([^}]*)", page.read_text())
    assert {name for name, _ in palettes} == {"light", "dark"}
    for _, rules in palettes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", rules))
        for ink in ("ink", "faint"):
            for ground in ("paper", "shade"):
                assert contrast_ratio(colours[ink], colours[ground]) >= 4.5
    for theme in THEMES:
        assert contrast_ratio(theme.ink, theme.background) >= 4.5


def browse(page: Path, folder: Path, *, dark: bool, extra: tuple[str, ...]) -> str:
    """Open a page in headless Chromium without network access and return the browser's log."""
    profile = folder / f"profile-{dark}-{len(extra)}-{extra[0][:6].strip('-')}"
    finished = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"),
            *(
                "--window-size=1200,2300",
                "--hide-scrollbars",
                f"--blink-settings=preferredColorScheme={int(not dark)}",
            ),
            *extra,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return finished.stdout + finished.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_renders_in_chromium_without_a_console_error(page, tmp_path, dark):
    shot = tmp_path / "shot.png"
    log = browse(page, tmp_path, dark=dark, extra=(f"--screenshot={shot}",))
    assert "CONSOLE" not in log, log
    image = matplotlib.image.imread(shot)[..., :3]
    paper = image[5, 5]
    assert (paper.mean() < 0.15) == dark
    assert np.abs(image - paper).mean(axis=-1).max() > 0.7  # ink on paper
    assert (np.abs(image - paper).max(axis=-1) > 0.25).mean() > 0.02  # tables and figures are there


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
def test_chromium_reports_a_script_that_the_policy_forbids(page, tmp_path):
    """Control of the test above: a forbidden script is a console message."""
    broken = page.with_name("broken.html")
    broken.write_text(page.read_text().replace("</body>", "<script>alert(1)</script></body>"))
    assert "CONSOLE" in browse(broken, tmp_path, dark=False, extra=("--dump-dom",))


def test_command_writes_the_report_and_prints_errors(runs, tmp_path, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    credit_compare.add_arguments(parser)
    target = str(tmp_path / "out")
    assert credit_compare.run(parser.parse_args([str(runs), "--output_dir", target, "--target", "0.3"])) == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert "Steps to a score" in capsys.readouterr().out
    with pytest.raises(ValueError, match="PPO"):
        credit_compare.run(parser.parse_args([str(runs), "--baseline", "PPO", "--output_dir", target]))


@pytest.mark.parametrize("length", [10, 60])
def test_legend_of_the_curves_is_inside_the_figure(write_run, tmp_path, monkeypatch, length):
    for name in "abcde":
        write_run(name, {step: dict.fromkeys(PROMPTS, 0.5) for step in (0, 5)}, arm=name * length)
    monkeypatch.setattr(figures, "_png", lambda figure: figure)
    figure = figures.curves_figure(compare([tmp_path]), THEMES[0])
    figure.draw_without_rendering()
    [legend] = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0.0
    assert box.x1 <= figure.bbox.width


def test_ablation_figure_is_a_png_of_its_theme():
    points = {
        "Score": [(0.0, 0.5, 0.4, 0.6), (0.1, 0.6, 0.5, 0.7)],
        "S_t": [(0.0, 0.2, 0.1, 0.3), (0.1, 0.1, 0.0, 0.2)],
    }
    light, dark = (ablation_figure(points, "λ", theme) for theme in THEMES)
    assert light.startswith(b"\x89PNG")
    assert light != dark
    assert light == ablation_figure(points, "λ", THEMES[0])
