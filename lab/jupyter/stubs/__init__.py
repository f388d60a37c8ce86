"""The functions that readers write themselves, and the checks of ``lab check``.

A notebook has at most one stub: the cell that is tagged ``stub``. The cell after it has the solution.
"""

END = "\0"
"""The end of a cell, in the input of the process that runs it."""
