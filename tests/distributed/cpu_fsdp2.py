"""FSDP2 on CPU for tests: accelerate selects it on accelerators only and falls back to DDP elsewhere."""

import os

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def install() -> None:
    """Patch accelerate; call it before the configuration is built."""
    os.environ.update(ENVIRONMENT)
    original = AcceleratorState.__init__

    def patched(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)

    AcceleratorState.__init__ = patched
