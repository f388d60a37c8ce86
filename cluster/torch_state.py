"""Torch's state that belongs to a thread: modes, hooks, autocast, and whether gradients are recorded."""

import torch

from cluster.torch_private import pop_dispatch_modes, pop_function_modes, pop_saved_tensors_hooks


def reset() -> None:
    """Reset torch's thread-local modes after an interrupted call.

    A `with` block normally undoes its mode when an exception passes through it. An interrupt can arrive while
    the block is being left, and then the mode stays on. Without the reset the next call would run in that
    mode, for example without gradients.
    """
    pop_dispatch_modes()
    pop_function_modes()
    # After the function modes: they would intercept this call.
    torch.set_grad_enabled(True)
    pop_saved_tensors_hooks()
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
