"""Draw `docs/images/check.svg`, the output of `trl credit --check` on the files of `trl credit-init`.

    python docs/make_check.py

Runs the two commands in a terminal of 84 columns, so that the tokens have the colours of their R_t.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

FIGURE = Path(__file__).parent / "images" / "check.svg"
TRL = [sys.executable, "-m", "credit_trl"]
WIDTH = 84


def in_terminal(command: list[str], folder: str) -> str:
    """Output of a command that runs in a pseudo-terminal."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=slave, stderr=subprocess.DEVNULL) as process:
        os.close(slave)
        parts = []
        try:
            while part := os.read(master, 65536):
                parts.append(part)
        except OSError:  # Linux's end of a pseudo-terminal
            pass
        assert process.wait() == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*TRL, "credit-init", folder], check=True)
        output = in_terminal([*TRL, "credit", "--config", "run.yaml", "--check", "true"], folder)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(output[output.index("--- prompt") :].rstrip()))
    picture = console.export_svg(title="trl credit --config run.yaml --check true")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # fonts of the network
    FIGURE.write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n", encoding="utf-8")
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
