"""JupyterLab on the first notebook, as ``lab open`` starts it."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from jupyterlab.labapp import LabApp

from lab.errors import LabError
from lab.jupyter.executing import FOLDER, find
from lab.jupyter.security import jupyter_config, token_is_off


def serve(*, port: int, browser: bool, ip: str = "127.0.0.1") -> None:
    """Serve JupyterLab at the address `ip` until interrupted; its token stays on.

    Raises:
        LabError: the port is taken, the address is not this machine's, or Jupyter's token is switched off.
    """
    if token_is_off(jupyter_config()):
        raise LabError("Jupyter's configuration switches its token off; anyone could run code: remove that")
    with socket.socket() as probe:
        # As the server itself binds: a port that only lingers after a closed connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LabError(f"--ip {ip}: {error.strerror}; 127.0.0.1 would work") from None
            message = f"port {port} is in use: close what runs there or give another with --port"
            raise LabError(message) from None
    LabApp.launch_instance(
        [
            *arguments(FOLDER.parent, f"{FOLDER.name}/{find([])[0].path.name}", ip),
            f"--ServerApp.port={port}",
            f"--ServerApp.open_browser={browser}",
        ]
    )


def arguments(root: Path, first: str, ip: str = "127.0.0.1") -> list[str]:
    """JupyterLab's arguments to serve the folder ``root``, opening on the notebook ``first`` in it."""
    return [
        f"--ServerApp.root_dir={root}",
        f"--ServerApp.ip={ip}",
        "--ServerApp.port_retries=0",
        f"--LabApp.default_url=/lab/tree/{first}",
        # The first start would ask about news, over the very first thing a newcomer sees.
        f"--LabApp.app_settings_dir={Path(__file__).parent / 'settings'}",
        # Jupyter refuses root; inside containers there is often nobody else, and the server is on loopback.
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
    ]
