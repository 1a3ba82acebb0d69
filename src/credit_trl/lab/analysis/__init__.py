"""Analysis of the credit: token maps, probe, mutual information, compatibility, interventional credit, branches.

    from credit_trl.lab.analysis import Checkpoint, map_response, sample_rollouts, write_maps

No module of this package imports the trainer.
"""

from credit_trl.lab.analysis.callback import CreditMapCallback
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.probing import ProbeSettings, probe
from credit_trl.lab.analysis.responses import Rollout, analysis_config, sample_rollouts
from credit_trl.lab.analysis.targets import Arm
from credit_trl.lab.analysis.tokenmap import (
    TokenMap,
    format_summary,
    map_response,
    read_maps,
    summarize_maps,
    write_maps,
)

__all__ = [
    "Arm",
    "Checkpoint",
    "CreditMapCallback",
    "ProbeSettings",
    "Rollout",
    "TokenMap",
    "analysis_config",
    "format_summary",
    "map_response",
    "probe",
    "read_maps",
    "sample_rollouts",
    "summarize_maps",
    "write_maps",
]
