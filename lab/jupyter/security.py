"""Finding what other users can reach: Jupyter servers, and the files of clusters."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from ipaddress import ip_address

from jupyter_core.paths import jupyter_config_path
from jupyter_server.serverapp import list_running_servers
from traitlets.config import Application, Config

from cluster.permissions import connection_files, private_keys, readable_by_others

_NAMES = ("jupyter_config", "jupyter_notebook_config", "jupyter_server_config", "jupyter_lab_config")


def find_exposures() -> Iterator[str]:
    """Yield a line for each Jupyter server, setting and key file that other users can use."""
    for server in list_running_servers():
        where = f"the Jupyter server of process {server['pid']}"
        if not is_loopback(server["hostname"]):
            yield f"{where} listens on {server['hostname']}, beyond loopback"
        if not (server["token"] or server["password"]):
            yield f"{where} asks for no token"
    config = jupyter_config()
    ip = config.get("ServerApp", {}).get("ip", "localhost")
    if not is_loopback(ip):
        yield f"Jupyter's configuration has it listen on {ip}, beyond loopback (`lab open` does not)"
    if token_is_off(config):
        yield "Jupyter's configuration switches its token off (`lab open` refuses that)"
    for kind, files in (("private key", private_keys()), ("connection file", connection_files())):
        for path in readable_by_others(files):
            yield f"others can read the {kind} {path}; chmod 600 closes it"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on ``host``."""
    if host in ("", "*"):
        return False
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_is_off(config: Config) -> bool:
    """Return whether a Jupyter server with this configuration asks for neither a token nor a password."""
    tokens = [config[name]["token"] for name in ("ServerApp", "IdentityProvider") if "token" in config[name]]
    passwords = [config.ServerApp.get("password"), config.PasswordIdentityProvider.get("hashed_password")]
    return "" in tokens and not any(passwords)


def jupyter_config() -> Config:
    """Return the configuration that Jupyter reads from its files."""
    # A server skips a file with an error too, and says so.
    application = Application(log_level=logging.CRITICAL)
    for name in _NAMES:
        application.load_config_file(name, jupyter_config_path())
    return application.config
