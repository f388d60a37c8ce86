"""Serving JupyterLab, for ``lab open``."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from jupyterlab.labapp import LabApp

from lab.errors import LabError
from lab.jupyter.executing import find_notebooks, own_python_first
from lab.jupyter.security import jupyter_config, token_is_off


def check_address(port: int, ip: str) -> None:
    """Check that JupyterLab can be served at this address.

    Raises:
        LabError: The port is in use, the address does not belong to this machine, or Jupyter's configuration
            switches the token off.
    """
    if token_is_off(jupyter_config()):
        raise LabError(
            "Jupyter's configuration switches its token off, so anyone could run code: remove that setting"
        )
    with socket.socket() as probe:
        # With the same option as the server: a port in TIME_WAIT after a closed connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LabError(f"--ip {ip}: {error.strerror}; 127.0.0.1 would work") from None
            message = f"port {port} is in use: close what runs there or give another with --port"
            raise LabError(message) from None


def serve(folder: Path, *, port: int, browser: bool, ip: str) -> None:
    """Serve JupyterLab, opened on the first notebook of ``folder``, until it is interrupted.

    It asks for a token, which is in the address that it prints, or for the token or password that the user
    has configured, which is not.

    Args:
        folder: A folder with copies of the lab's notebooks.
        port: The port to listen on.
        browser: Whether to open a browser.
        ip: The address to listen on.
    """
    own_python_first()
    server = LabApp.initialize_server(
        [
            *jupyterlab_arguments(folder, find_notebooks([])[0].path.name, ip),
            f"--ServerApp.port={port}",
            f"--ServerApp.open_browser={browser}",
        ]
    )
    if not server.identity_provider.token_generated:
        address = server.public_url.partition("?")[0]
        print(
            f"JupyterLab runs at {address}, with the token or password that you have configured", flush=True
        )
    server.start()


def jupyterlab_arguments(root: Path, first: str, ip: str = "127.0.0.1") -> list[str]:
    """Return JupyterLab's arguments to serve the folder ``root`` and open the notebook ``first`` in it."""
    return [
        f"--ServerApp.root_dir={root}",
        f"--ServerApp.ip={ip}",
        "--ServerApp.port_retries=0",
        # The address alone is printed, and not the lines of the server's extensions.
        "--ServerApp.log_level=ERROR",
        "--LabApp.log_level=ERROR",
        f"--LabApp.default_url=/lab/tree/{first}",
        # Without these settings, the first start covers the notebook with a question about news.
        f"--LabApp.app_settings_dir={Path(__file__).parent / 'settings'}",
        # Jupyter does not start as root without this. In a container, root is often the only user.
        *(["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
    ]
