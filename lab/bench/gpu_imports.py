"""Imports what the processes of ``lab bench gpu`` need, in the server from which they are forked.

An error of an import is raised again in the first of these processes, which imports the module too.
"""

from contextlib import suppress

with suppress(Exception):
    import lab.bench.gpu_row  # noqa: F401
