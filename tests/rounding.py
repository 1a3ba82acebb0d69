"""A quantizer for transformers' loader that every machine runs: weights of linear layers in steps of 1/16."""

import torch
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

OPTIONS = {"quantization_config": {"quant_method": "rounding"}, "dtype": "float32"}  # of `from_pretrained`


@register_quantization_config("rounding")
class RoundingConfig(QuantizationConfigMixin):
    def __init__(self, **kwargs) -> None:
        self.quant_method = "rounding"


@register_quantizer("rounding")
class Rounding(HfQuantizer):
    requires_calibration = False
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model, **kwargs) -> None:
        pass

    def _process_model_after_weight_loading(self, model, **kwargs) -> torch.nn.Module:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = rounded(module.weight.data)
        return model


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 16).round() / 16
