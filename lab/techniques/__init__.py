"""The techniques: one function ``apply_<technique>`` each. ``lab/step/compose.py`` applies them in order."""

from lab.techniques.attention.naive import naive_attention
from lab.techniques.checkpointing import apply_checkpointing
from lab.techniques.exchange import degrees, heads_from_sequence, sequence_from_heads
from lab.techniques.loss import apply_loss, apply_tiled_loss
from lab.techniques.offload import apply_offload
from lab.techniques.ring import apply_ring
from lab.techniques.sharding import apply_fsdp
from lab.techniques.tiling import apply_tiled_mlp, apply_tiled_norms, run_in_tiles
from lab.techniques.ulysses import apply_ulysses, ulysses_attention
from lab.techniques.upipe.layer import apply_upipe
from lab.techniques.upipe.passes import forward_pass
from lab.techniques.upipe.schedule import schedule

__all__ = [
    "apply_checkpointing",
    "apply_fsdp",
    "apply_loss",
    "apply_offload",
    "apply_ring",
    "apply_tiled_loss",
    "apply_tiled_mlp",
    "apply_tiled_norms",
    "apply_ulysses",
    "apply_upipe",
    "degrees",
    "forward_pass",
    "heads_from_sequence",
    "naive_attention",
    "run_in_tiles",
    "schedule",
    "sequence_from_heads",
    "ulysses_attention",
]
