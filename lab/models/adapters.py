"""LoRA adapters of PEFT, added to a model of transformers.

Only this module and ``lab.hf`` import peft.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

import torch
from transformers import PreTrainedModel

from lab.decoder import shape_of
from lab.errors import LabError, ModelError
from lab.models.lora import Lora, is_adapter
from lab.torch_private import unset_fake_temporarily


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Add adapters to a model, and freeze all of its other parameters.

    The adapters of a model whose parameters have no memory have none either. Adapters in half precision are
    fp32, as PEFT makes them, unless ``lora`` has another dtype; the others have the dtype of the projection's
    weights.

    Raises:
        ModelError: A target is no projection of the model's layers; a dtype for adapters of a model that is
            not in bf16.
        LabError: PEFT is not installed.
    """
    targets = lora.targets_in(shape_of(model.config))
    if lora.dtype is not None and model.dtype != torch.bfloat16:
        raise ModelError(
            f"lora: dtype={lora.dtype} in a model in {str(model.dtype).removeprefix('torch.')}: adapters "
            "have its dtype; leave it out, or make the model bfloat16 (--dtype bfloat16)"
        )
    try:
        # PEFT imports accelerate, which imports DeepSpeed if it is installed, and DeepSpeed logs to stdout.
        with redirect_stdout(sys.stderr):
            from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise LabError("LoRA adapters need PEFT, which is not installed: pip install -e '.[hf]'") from error
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.scale * lora.r,  # type: ignore[arg-type]
        target_modules=list(targets),
        lora_dropout=0.0,
        bias="none",
    )
    # PEFT moves what it makes to the device and the dtype of the weights. Torch refuses that of fake tensors.
    with unset_fake_temporarily():
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
        for name, parameter in model.named_parameters():
            if lora.dtype is not None and is_adapter(name):
                parameter.data = parameter.data.to(getattr(torch, lora.dtype))
