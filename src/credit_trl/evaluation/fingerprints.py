"""What tells two models' weights apart: an evaluation is only continued by the model that began it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch


def file_fingerprint(folder: Path, blocks: int = 256) -> str:
    """16 hex digits that change when a weight file does: hashed names, sizes and evenly spaced blocks of 4 KiB."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin") and p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for position in sorted({size * block // blocks for block in range(blocks)}):
                file.seek(position)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]


@torch.no_grad()
def weight_fingerprint(model: torch.nn.Module) -> str:
    """16 hex digits that change when a weight does: hashed sums and sums of squares of this process's weights."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3 keeps its shard there
        weights = weights.to_local() if hasattr(weights, "to_local") else weights
        precise = torch.float32 if weights.device.type == "mps" else torch.float64
        flat = weights.detach().flatten()
        flat = flat if flat.is_floating_point() else flat.float()  # a four-bit base is packed in bytes
        sums = (flat.sum(dtype=precise).item(), torch.linalg.vector_norm(flat, dtype=precise).item())
        digest.update(f"{name} {tuple(weights.shape)} {sums[0].hex()} {sums[1].hex()}\n".encode())
    return digest.hexdigest()[:16]
