"""Two processes, of which one has no images in its micro-batch, equal one process."""

import pytest
import torch

from distributed.launching import finished, launch, weights


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"ddp_find_unused_parameters": False}], ids=str)
def test_a_process_without_images_joins_the_gradients_of_the_tower(tmp_path, options):
    """Where DDP does not look for unused parameters, it waits for the gradient of every one."""
    finished(launch(tmp_path / "one", 1, job="image_run", **options))
    finished(launch(tmp_path / "two", 2, job="image_run", **options))
    expected, *trained = weights(tmp_path / "one"), weights(tmp_path / "two"), weights(tmp_path / "two", 1)
    for process_weights in trained:
        for name, value in expected.items():
            torch.testing.assert_close(
                process_weights[name], value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )
