"""Print the oldest and the newest supported TRL that pip finds; on stderr, those that are newer than both."""

import re
import subprocess
import sys
from importlib.metadata import version

from packaging.version import Version

from credit_trl.trl_compat import TESTED_TRL


def choose(available: list[str], tested: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(oldest and newest of the tested minors, releases newer than all of them), oldest first."""
    releases = sorted({Version(text) for text in available if not Version(text).is_prerelease})
    minors = [Version(text).release for text in tested]
    supported = [str(release) for release in releases if release.release[:2] in minors]
    newer = [str(release) for release in releases if release.release[:2] > max(minors)]
    return [supported[0], supported[-1]], newer


def listed_versions(name: str) -> list[str]:
    """Versions of a package that pip finds; without one, the program ends with pip's message."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    match = re.search(r"Available versions: (.+)", listed.stdout)
    if match is None:
        sys.exit(f"pip lists no version of {name}: {listed.stderr.strip()[-300:]}")
    return match[1].split(", ")


def main() -> int:
    supported, newer = choose(listed_versions("trl"), TESTED_TRL)
    if newer:
        print(f"not tested, newer than {supported[-1]}: TRL {', '.join(newer)}", file=sys.stderr)
    else:
        print(f"no TRL is newer than {supported[-1]}", file=sys.stderr)
    if supported[-1] == version("trl"):  # all tests have it
        print(f"TRL {supported[-1]} is that of `make test`", file=sys.stderr)
        supported.pop()
    print(*dict.fromkeys(supported))
    return 0


if __name__ == "__main__":
    sys.exit(main())
