"""Manifest of a checkpoint: each file with its size and hash, so that a damaged one is not resumed from."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from credit_trl.training.run_directory import read_json, write_atomically

MANIFEST_FILE = "manifest.json"


def hash_files(folder: Path) -> dict[str, str]:
    """`size:hash` of each file below a folder, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(_digest, files))
    return {path.relative_to(folder).as_posix(): digest for path, digest in zip(files, digests, strict=True)}


def write_manifest(folder: Path, hashes: dict[str, str]) -> None:
    """Write the manifest, the last file that a checkpoint gets, with a hash of its own."""
    listed = json.dumps(hashes)
    own = xxhash.xxh3_128(listed.encode()).hexdigest()
    write_atomically(folder / MANIFEST_FILE, json.dumps({"files": listed, "xxh3_128": own}) + "\n")


def find_damage(folder: Path) -> str | None:
    """What differs from the manifest, beginning with the path of the file; None for an undamaged folder."""
    manifest = folder / MANIFEST_FILE
    try:
        found = read_json(manifest)
    except FileNotFoundError:
        return f"{manifest} is missing, so the checkpoint was not written completely"
    except ValueError:
        found = {}
    listed = str(found.get("files"))
    if found.get("xxh3_128") != xxhash.xxh3_128(listed.encode()).hexdigest():
        return f"{manifest} is damaged"
    for name, expected in json.loads(listed).items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if _digest(path) != expected:
            size = expected.partition(":")[0]
            return f"{path} has changed since it was written ({path.stat().st_size} bytes, then {size})"
    return None


def _digest(path: Path) -> str:
    """Size and xxh3 of a file: it finds damage, at the speed of memory, and is no protection against an attack."""
    with path.open("rb") as file:
        return f"{path.stat().st_size}:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"
