"""What a call that ended in its middle left switched in this thread, switched back."""

import torch
from torch.utils import _python_dispatch


def end_modes() -> None:
    """Switch off torch's modes in this thread: gradients are recorded, and nothing stands in between.

    A `with` block undoes what it did also when an exception passes through it; an interrupt can come while it
    does. Left off, gradients would be missing in the next call, far from their cause.
    """
    while _python_dispatch._get_current_dispatch_mode_stack():
        _python_dispatch._pop_mode()
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    torch.set_grad_enabled(True)  # not before: a function mode sees it
    while torch._C._autograd._top_saved_tensors_default_hooks(False):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
