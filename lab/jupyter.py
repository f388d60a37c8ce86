"""JupyterLab on the first notebook, as ``lab open`` starts it."""

from __future__ import annotations

import os
import socket

from jupyterlab.labapp import LabApp

from lab.errors import LabError
from lab.notebooks import FOLDER, find


def serve(*, port: int, browser: bool) -> None:
    """Serve JupyterLab on loopback until interrupted; its token stays on.

    Raises:
        LabError: the port is taken.
    """
    with socket.socket() as probe:
        # As the server itself binds: a port that only lingers after a closed connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            message = f"port {port} is in use: close what runs there or give another with --port"
            raise LabError(message) from None
    arguments = [
        f"--ServerApp.root_dir={FOLDER.parent}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.open_browser={browser}",
        f"--LabApp.default_url=/lab/tree/notebooks/{find([])[0].path.name}",
        # The first start would ask whether to fetch news, over the very first thing a newcomer sees.
        "--LabApp.news_url=None",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Jupyter refuses root; inside containers there is often nobody else, and the server is on loopback.
        arguments.append("--allow-root")
    LabApp.launch_instance(arguments)
