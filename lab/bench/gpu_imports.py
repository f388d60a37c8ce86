"""Imports what the processes of ``lab bench gpu`` need, in the server from which they are forked.

An error of an import is raised again in the first of these processes, which imports the module too.
"""

import signal
from contextlib import suppress

# The terminal's Ctrl-C is for the command. When the command has ended, the server ends too.
signal.signal(signal.SIGINT, signal.SIG_IGN)
with suppress(Exception):
    import lab.bench.gpu_row  # noqa: F401
