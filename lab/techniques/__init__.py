"""The techniques: one function ``apply_<technique>`` each. ``lab/step/compose.py`` applies them in order."""

from typing import TYPE_CHECKING

from lab import load_on_first_use

if TYPE_CHECKING:
    from lab.techniques.attention.naive import naive_attention
    from lab.techniques.checkpointing import apply_checkpointing
    from lab.techniques.exchange import heads_from_sequence, sequence_from_heads
    from lab.techniques.gathered import apply_gathered
    from lab.techniques.loss import apply_loss, apply_tiled_loss
    from lab.techniques.offload import apply_offload
    from lab.techniques.ring import apply_ring, local_positions, ring_forward, ring_kernel
    from lab.techniques.sharding import apply_fsdp
    from lab.techniques.tiling import apply_tiled_mlp, apply_tiled_norms, run_in_tiles
    from lab.techniques.ulysses import apply_ulysses, ulysses_attention
    from lab.techniques.ulysses_degrees import check_degree, degree_pairs, degrees
    from lab.techniques.upipe.layer import apply_upipe
    from lab.techniques.upipe.passes import forward_stages
    from lab.techniques.upipe.schedule import schedule

__all__ = [
    "apply_checkpointing",
    "apply_fsdp",
    "apply_gathered",
    "apply_loss",
    "apply_offload",
    "apply_ring",
    "apply_tiled_loss",
    "apply_tiled_mlp",
    "apply_tiled_norms",
    "apply_ulysses",
    "apply_upipe",
    "check_degree",
    "degree_pairs",
    "degrees",
    "forward_stages",
    "heads_from_sequence",
    "local_positions",
    "naive_attention",
    "ring_forward",
    "ring_kernel",
    "run_in_tiles",
    "schedule",
    "sequence_from_heads",
    "ulysses_attention",
]

__getattr__ = load_on_first_use(
    __name__,
    {
        "apply_checkpointing": "lab.techniques.checkpointing",
        "apply_fsdp": "lab.techniques.sharding",
        "apply_gathered": "lab.techniques.gathered",
        "apply_loss": "lab.techniques.loss",
        "apply_offload": "lab.techniques.offload",
        "apply_ring": "lab.techniques.ring",
        "apply_tiled_loss": "lab.techniques.loss",
        "apply_tiled_mlp": "lab.techniques.tiling",
        "apply_tiled_norms": "lab.techniques.tiling",
        "apply_ulysses": "lab.techniques.ulysses",
        "apply_upipe": "lab.techniques.upipe.layer",
        "check_degree": "lab.techniques.ulysses_degrees",
        "degree_pairs": "lab.techniques.ulysses_degrees",
        "degrees": "lab.techniques.ulysses_degrees",
        "forward_stages": "lab.techniques.upipe.passes",
        "heads_from_sequence": "lab.techniques.exchange",
        "local_positions": "lab.techniques.ring",
        "naive_attention": "lab.techniques.attention.naive",
        "ring_forward": "lab.techniques.ring",
        "ring_kernel": "lab.techniques.ring",
        "run_in_tiles": "lab.techniques.tiling",
        "schedule": "lab.techniques.upipe.schedule",
        "sharding": "lab.techniques.sharding",
        "sequence_from_heads": "lab.techniques.exchange",
        "ulysses_attention": "lab.techniques.ulysses",
    },
)
