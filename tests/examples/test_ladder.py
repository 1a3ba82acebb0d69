"""The steps `examples/01_…` to `08_…`, run in order in one folder as a reader runs them."""

import base64
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = "https://huggingface.co/you/desk"
LADDER = sorted(EXAMPLES.glob("0*.py"))


class Hub(BaseHTTPRequestHandler):
    """The requests of an upload. The server's `files` are those of the commit."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = {"url": PAGE, "errors": [], "warnings": []}
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": file["path"], **modes} for file in files]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"{PAGE}/commit/0", "commitOid": "0", "pullRequestUrl": None}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the steps run, with what 01 to 07 have printed in it, by their numbers."""
    folder = tmp_path_factory.mktemp("ladder")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(EXAMPLES)
        patch.setenv("OMP_NUM_THREADS", "1")
        for script in LADDER[:-1]:
            ran = run(script)
            assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
            (folder / f"{script.name[:2]}.txt").write_text(ran.stdout, encoding="utf-8")
        yield folder


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=1500, check=False
    )


def printed(folder: Path, number: int) -> str:
    return (folder / f"{number:02}.txt").read_text("utf-8")


def test_ladder_has_eight_short_steps_that_the_page_lists():
    assert [int(script.name[:2]) for script in LADDER] == list(range(1, 9))
    page = (EXAMPLES / "README.md").read_text("utf-8")
    for number, script in enumerate(LADDER, 1):
        text = script.read_text("utf-8")
        assert len(text.splitlines()) <= 40
        assert text.startswith(f'"""Step {number} of 8: ')
        assert f"]({script.name})" in page


def test_verifier_of_the_first_step_has_ten_lines(capsys):
    names = runpy.run_path(str(LADDER[0]), run_name="__main__")
    right, wrong = capsys.readouterr().out.splitlines()
    assert "reward=1.0, feedback='Correct option: C.'" in right
    assert "reward=0.0, feedback='Correct option: C.'" in wrong
    assert names["check"].__code__.co_firstlineno + 10 > max(line for *_, line in names["check"].__code__.co_lines())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_steps_train_evaluate_and_compare(folder):
    low, high = re.search(r"^difference .* interval (\S+) to (\S+)$", printed(folder, 3), re.M).groups()
    assert 0.0 < float(low) < float(high)
    for arm in ("GRPO", "SDPO", "CREDIT λ = 0.1"):
        assert re.search(rf"^\| desk \| {arm} \| 1 \| 20 \|", printed(folder, 4), re.M)
    assert re.search(r"^' (health|travel)' +-\d", printed(folder, 5), re.M)  # the wrong tool is punished
    for page in ("ladder/report.html", "arms/comparison.html", "maps.html", "recipe/report.html"):
        assert (folder / "runs" / page).is_file()
    assert [printed(folder, step).count("Report: ") for step in (2, 4, 6)] == [1, 3, 1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_last_step_publishes_model_and_card(folder):
    assert "  after  'Thought: doctor is about travel." in printed(folder, 7)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        hub.files = {}
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{hub.server_port}"
        ran = run(LADDER[-1], "you/desk", HF_ENDPOINT=address, HF_HUB_OFFLINE="0", HF_TOKEN="hf_of_nobody")
        hub.shutdown()
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= hub.files.keys()
    published = folder / "runs" / "published"
    assert hub.files["model.safetensors"] == (published / "model.safetensors").read_bytes()
    card = hub.files["README.md"].decode()
    for fact in ("- method: CREDIT λ = 0.1", "- base model: quickstart", "- score: avg@4 "):
        assert fact in card
        assert fact in ran.stdout
