"""What a test may leave behind for the next one in its process: nothing."""

import os
import threading
import time
from dataclasses import dataclass

import torch

# Threads of libraries that serve the whole process: fsspec's event loop and TRL's, tqdm's monitor, a timer of pytest.
SHARED_THREADS = ("fsspecIO", "TMonitor", "pytest_timeout", "IOPub", "Heartbeat", "GRPOTrainer-AsyncLoop")
# Variables that libraries derive from a configuration, as transformers does for accelerate, or that pytest sets.
LIBRARY_PREFIXES = (
    "ACCELERATE_",
    "FSDP_",
    "PYTEST_",
    "TORCH",
    "PYTORCH_",
    "CUDA",
    "KMP_",
    "TRACKIO_",
    "TOKENIZERS_",
    "COV_",
)
MAX_JOIN_SECONDS = 30.0  # ends a hang: a thread that was told to end takes milliseconds


@dataclass(frozen=True)
class ProcessState:
    """State of the process that tests share."""

    has_group: bool
    dtype: torch.dtype
    folder: str
    variables: dict[str, str]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> "ProcessState":
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        threads = frozenset(thread for thread in threading.enumerate() if not is_shared(thread))
        return cls(is_distributed, torch.get_default_dtype(), os.getcwd(), dict(os.environ), threads)

    def differences(self) -> list[str]:
        """What has changed since, in words."""
        self._join_new_threads()
        present = ProcessState.now()
        names = {name for name, _ in self.variables.items() ^ present.variables.items()}
        differences = {
            "a process group": self.has_group != present.has_group,
            f"the default dtype {present.dtype}": self.dtype != present.dtype,
            f"the working directory {present.folder}": self.folder != present.folder,
        }
        messages = [message for message, has_changed in differences.items() if has_changed]
        messages += [f"the variable {name}" for name in sorted(names) if not name.startswith(LIBRARY_PREFIXES)]
        messages += [f"the thread {thread.name}" for thread in present.threads - self.threads]
        return messages

    def _join_new_threads(self) -> None:
        deadline = time.monotonic() + MAX_JOIN_SECONDS
        for thread in threading.enumerate():
            if thread not in self.threads and not is_shared(thread):
                thread.join(max(0.0, deadline - time.monotonic()))

    def restore(self) -> None:
        """Undo the changes, so that the tests after a failure do not fail, too."""
        if not self.has_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.set_default_dtype(self.dtype)
        os.chdir(self.folder)
        for name in os.environ.keys() - self.variables.keys():
            del os.environ[name]
        os.environ.update(self.variables)


def is_shared(thread: threading.Thread) -> bool:
    """Whether a thread may outlive a test: those of libraries, and daemons, which wait for a client or a timeout."""
    names = (thread.name, type(thread).__name__)
    return thread.daemon or any(name.startswith(SHARED_THREADS) for name in names)
