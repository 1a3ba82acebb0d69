"""Short names of models: `quickstart`, the embedded model, and `smollm2`, SmolLM2-135M-Instruct."""

from __future__ import annotations

from credit_trl.tasks.quickstart_model import EMBEDDED_MODEL, SHIPPED
from credit_trl.tasks.smollm2 import SMOLLM2, smollm2_directory


def model_path(name: str) -> str:
    """Directory of the model for `"quickstart"` and `"smollm2"`; any other path or hub name unchanged.

    `"smollm2"` is downloaded on first use, see `smollm2.smollm2_directory`.
    """
    if name == SMOLLM2:
        return smollm2_directory()
    return str(SHIPPED) if name == EMBEDDED_MODEL else name
