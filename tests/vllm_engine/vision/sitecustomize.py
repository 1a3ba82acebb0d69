"""Declares the operators that torchvision's wheel has for CUDA only; without them it cannot be imported."""

import torch

for name in ("nms", "qnms"):  # no image processor calls them
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
