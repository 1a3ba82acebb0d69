"""Run the notebooks from top to bottom and save their outputs.

    python notebooks/run.py                  # all of them
    python notebooks/run.py 01_quickstart    # one

Each runs in an empty folder. If a cell raises, the command ends and the notebook is unchanged.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def execute(notebook: nbformat.NotebookNode, *, timeout: int = 600) -> nbformat.NotebookNode:
    """Run every cell in a fresh kernel, in an empty folder, without a network, and return the notebook with outputs.

    Args:
        notebook: The notebook; its outputs are replaced.
        timeout: Seconds per cell.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries; the trainer's lines are printed
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # has `credit-trl`
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore:IProgress not found")  # of the libraries
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as sockets:
        kernel = AsyncKernelManager(kernel_name="python3", connection_file=f"{sockets}/kernel.json")
        kernel.transport = "ipc" if os.name == "posix" else "tcp"  # sockets of this user only
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, km=kernel, timeout=timeout, resources=resources, record_timing=False).execute(
            cleanup_kc=True
        )
        _make_paths_relative(notebook, folder)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _make_paths_relative(notebook: nbformat.NotebookNode, folder: str) -> None:
    """Make paths in the outputs relative to the folder of the run, the checkout or a temporary folder."""
    temporary = re.escape(tempfile.gettempdir()) + r"/\w+"
    places = re.compile(f"({re.escape(folder)}|{re.escape(str(FOLDER.parent.resolve()))}|{temporary})(/|\\b)")
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        for texts in (output, output.get("data", {})):
            for kind in ("text", "text/plain", "text/markdown", "text/html"):
                if kind in texts:
                    texts[kind] = places.sub(lambda found: "" if found[2] else ".", texts[kind])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="such as 01_quickstart; all by default")
    args = parser.parse_args()
    for name in args.names or [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]:
        path = FOLDER / f"{name}.ipynb"
        started = time.monotonic()
        nbformat.write(execute(nbformat.read(path, as_version=4)), path)
        print(f"{path.name}: {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
