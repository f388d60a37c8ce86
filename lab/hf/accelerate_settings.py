"""Settings of accelerate, from a script or from ``accelerate launch``, and which of them a recipe allows."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch.distributed.fsdp import CPUOffloadPolicy

from lab.errors import RecipeError
from lab.hf.shared_sequences import SharedSequences
from lab.recipe.recipe import Recipe
from lab.techniques.unsupported import instead_of

PRECISION = "ACCELERATE_MIXED_PRECISION"
PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"

_LAUNCHED = {
    PRECISION: "mixed_precision, or the flag --mixed_precision",
    PARALLELISM: "parallelism_config, or the flag --use_parallelism_config",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_config, or the flag --dynamo_backend",
    "ACCELERATE_USE_DEEPSPEED": "distributed_type, or the flag --use_deepspeed",
    "ACCELERATE_USE_FSDP": "distributed_type, or the flag --use_fsdp",
    "FSDP_VERSION": "fsdp_config, or the flag --fsdp_version",
    "FSDP_ACTIVATION_CHECKPOINTING": "fsdp_config, or the flag --fsdp_activation_checkpointing",
    "FSDP_OFFLOAD_PARAMS": "fsdp_config, or the flag --fsdp_offload_params",
    "FSDP_RESHARD_AFTER_FORWARD": "fsdp_config, or the flag --fsdp_reshard_after_forward",
}
"""What sets each variable of the environment: a key in the file of ``accelerate launch``, or its flag."""


def refusal(message: str, variable: str) -> RecipeError:
    """Return an error; if ``accelerate launch`` set the variable, it says where the setting is changed."""
    if variable in os.environ:
        message += (
            f"; {variable}={os.environ[variable]} is in the environment: accelerate launch sets it by "
            f"{_LAUNCHED[variable]}"
        )
    return RecipeError(message)


def launched_precision() -> str:
    """Return the mixed precision of ``accelerate launch``, "no" or "bf16".

    Raises:
        RecipeError: It is another one.
    """
    precision = os.environ.get(PRECISION, "no").lower()
    _check_precision(precision)
    return precision


def _check_precision(precision: str) -> None:
    if precision not in ("no", "bf16"):
        raise refusal(
            f"mixed_precision={precision!r} with a recipe, which has neither loss scales nor fp8: use bf16",
            PRECISION,
        )


def refuse_launched_parallelism() -> None:
    """Refuse a ``parallelism_config`` of ``accelerate launch`` for a trainer, which makes its own.

    Raises:
        RecipeError: There is one.
    """
    if os.environ.get(PARALLELISM, "false").lower() == "true":
        raise refusal("a parallelism_config with a recipe, which makes its own: leave it out", PARALLELISM)


def check_parallelism(recipe: Recipe, accelerator: Accelerator) -> None:
    """Refuse a recipe that accelerate's configuration contradicts.

    Raises:
        RecipeError: The first contradiction.
    """
    shared = recipe.ulysses * recipe.ring
    config = accelerator.parallelism_config
    for name in ("tp_size", "sp_size", "ep_size"):
        size = getattr(config, name, 1)
        if size > 1:
            raise refusal(
                f"{name}={size} in the parallelism_config together with a recipe: its ulysses and ring shard "
                f"sequences, and its fsdp the parameters; leave it out{instead_of(name)}",
                PARALLELISM,
            )
    replicas = getattr(config, "dp_replicate_size", 1)
    if replicas > 1:
        raise refusal(
            f"dp_replicate_size={replicas} in the parallelism_config with replicas={recipe.replicas} in the "
            "recipe, which replicates shards itself: set replicas in the recipe, and leave it out",
            PARALLELISM,
        )
    cp_size = getattr(config, "cp_size", 1)
    if cp_size != shared or (shared > 1 and not isinstance(config, SharedSequences)):
        raise refusal(
            f"cp_size={cp_size} in the parallelism_config with ulysses={recipe.ulysses}, ring={recipe.ring}: "
            f"{shared} ranks share a sequence; give lab.hf.parallelism(recipe, ranks)",
            PARALLELISM,
        )
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        raise refusal(
            "DeepSpeed's engine with a recipe: both would shard the model; use fsdp=True in the recipe",
            "ACCELERATE_USE_DEEPSPEED",
        )
    _check_precision(accelerator.mixed_precision)
    if accelerator.mixed_precision == "bf16" and recipe.compute_dtype != "bfloat16":
        raise refusal(
            f"mixed_precision='bf16' with compute_dtype={recipe.compute_dtype!r} in the recipe: autocast "
            "would run around the techniques; use compute_dtype='bfloat16' in the recipe, or set "
            "mixed_precision='no'",
            PRECISION,
        )
    dynamo = getattr(accelerator.state, "dynamo_plugin", None)
    if dynamo is not None and dynamo.backend != DynamoBackend.NO:
        raise refusal(
            f"dynamo_backend={dynamo.backend.value!r} with a recipe: the techniques run uncompiled; leave it "
            "out, and use compile='tiles' in the recipe",
            "ACCELERATE_DYNAMO_BACKEND",
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        _check_plugin(recipe, plugin)


def _check_plugin(recipe: Recipe, plugin: Any) -> None:
    """Refuse settings of accelerate's FSDP."""
    if not recipe.fsdp:
        raise refusal(
            "accelerate's FSDP together with a recipe of fsdp=False: they contradict each other; set "
            "fsdp=True in the recipe, or leave accelerate's FSDP out",
            "ACCELERATE_USE_FSDP",
        )
    if plugin.fsdp_version != 2:
        raise refusal(
            "FSDP version 1 with a recipe: its flat parameters hide the weights; use version 2",
            "FSDP_VERSION",
        )
    offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    for name, variable, is_set in (
        ("activation_checkpointing", "FSDP_ACTIVATION_CHECKPOINTING", plugin.activation_checkpointing),
        ("cpu_offload", "FSDP_OFFLOAD_PARAMS", offloads),
        ("reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD", not plugin.reshard_after_forward),
    ):
        if is_set:
            raise refusal(
                f"{name}={getattr(plugin, name)} of accelerate's FSDP together with a recipe, which has "
                "checkpoint and optimizer for this: leave it out",
                variable,
            )
