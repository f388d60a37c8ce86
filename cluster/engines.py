"""The processes of a cluster: one controller, one engine for each rank, and the client that talks to them."""

import errno
import logging
import os
import shutil
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ipyparallel
import psutil
import zmq
from traitlets.config import Config

from cluster import registry
from cluster.background import BackgroundLoop
from cluster.client import Message, RankClient
from cluster.errors import ClusterError, name_ranks
from cluster.folders import ensure_home
from cluster.launchers import LAUNCHERS, ControllerLauncher
from cluster.logs import last_error
from cluster.network import LOOPBACK, reserved_ports
from cluster.permissions import check_private, new_directory
from cluster.processes import end, family
from cluster.profiles.base import Profile
from cluster.watchdog import is_alive

# What is raised where the system refuses a file, a thread or a connection, or takes too long.
REFUSED = (RuntimeError, OSError, zmq.ZMQError)

NOT_STARTED = "the cluster is not started; cluster.start() starts it"
POLL_SECONDS = 0.05
END_PATIENCE_SECONDS = 1.0

# The client sees an engine after its second heartbeat, hence the short period. Nannies report deaths, so an
# engine on a machine that is too busy to answer for a minute need not be lost.
CONTROLLER_ARGS = [
    "--IPController.use_threads=True",
    "--HeartMonitor.period=500",
    "--HeartMonitor.max_heartmonitor_misses=120",
]

# The ports that the controller listens on.
CONTROLLER_PORTS = 18

# Silences ipyparallel's messages about starts and stops. The processes have logs in the cluster's directory.
_quiet = logging.getLogger(__name__)
_quiet.setLevel(logging.CRITICAL + 1)


class Engines:
    """The engines of one cluster. Their ids are 0 to ranks - 1.

    Attributes:
        ranks: The number of ranks.
        profile: The profile that says how they are launched.
        timeout: How long a start or a restart may take, in seconds.
        inbox: The messages of the ranks.
        directory: The directory of the connection files and the logs.
    """

    def __init__(self, ranks: int, profile: Profile, timeout: float) -> None:
        """Prepare the launch.

        Args:
            ranks: The number of ranks.
            profile: The profile that says how they are launched.
            timeout: How long a start or a restart may take, in seconds.

        Raises:
            ClusterError: The controller cannot listen at the profile's address, or the disk has no space for
                logs.
        """
        ensure_home()
        address = profile.controller_address()
        self.ranks = ranks
        self.profile = profile
        self.timeout = timeout
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.directory = new_directory(profile.log_folder())
        self._processes: set[psutil.Process] = set()
        self._client: RankClient | None = None
        self._background = BackgroundLoop()
        config = Config()
        launcher = LAUNCHERS[profile.name]
        config[launcher.__name__].profile = profile
        self._cluster = ipyparallel.Cluster(
            n=ranks,
            controller=ControllerLauncher,
            engines=launcher,
            controller_location=address,
            controller_args=[
                *CONTROLLER_ARGS,
                # Only the ports for the engines are open outside loopback.
                f"--IPController.engine_ip={address}",
                f"--IPController.client_ip={LOOPBACK}",
                f"--IPController.monitor_ip={LOOPBACK}",
                *profile.controller_arguments(),
            ],
            profile_dir=str(self.directory),
            cluster_file="",
            load_profile=False,
            delay=0,
            shutdown_atexit=False,
            config=config,
            log=_quiet,
        )

    @property
    def client(self) -> RankClient:
        """The connected client.

        Raises:
            ClusterError: The engines are not started, or have been stopped.
        """
        if self._client is None:
            raise ClusterError(NOT_STARTED)
        return self._client

    def start(self) -> None:
        """Launch the controller and the engines, and return when every engine has registered.

        Raises:
            ClusterError: The controller or an engine does not start in time.
        """
        with reserved_ports(CONTROLLER_PORTS) as ports:
            self._cluster.controller_args.append(f"--IPController.ports={','.join(map(str, ports))}")
            self._start()

    def _start(self) -> None:
        deadline = time.monotonic() + self.timeout
        self._note_processes()
        try:
            self._background.run(self._cluster.start_controller(), self.timeout)
            controller = self._cluster.controller
            info = self._background.run(controller.get_connection_info(self.timeout), self.timeout)
            for path in controller.connection_files.values():
                check_private(path)
        except REFUSED as error:
            raise ClusterError(f"the controller did not start: {self._why(error)}") from error
        try:
            self._background.run(self._cluster.start_engines(self.ranks), self.timeout)
            self._note_processes()
            self._client = self._connect(info["client"], max(deadline - time.monotonic(), 1.0))
        except REFUSED as error:
            raise ClusterError(
                f"the ranks did not start: {str(error) or 'too late'}; logs are in {self.directory}/log"
            ) from error
        self._wait_for_ids(list(range(self.ranks)), deadline)

    def _connect(self, info: dict[str, Any], seconds: float) -> RankClient:
        # The controller is on this host. ipyparallel might not know the address as one of this host's,
        # because it looks up those addresses only once.
        here = {**info, "location": LOOPBACK}
        client = RankClient(here, cluster_id=self._cluster.cluster_id, timeout=seconds)
        client.inbox = self.inbox
        return client

    def restart(self) -> None:
        """End the engines, also those that are stuck, and launch new ones with the same ids.

        Raises:
            ClusterError: An engine does not end or start in time.
        """
        deadline = time.monotonic() + self.timeout
        ranks = self._cluster.engine_set
        ranks.kill()
        leave = time.monotonic() + ranks.LEAVE_SECONDS
        while self.client.ids and time.monotonic() < leave:
            time.sleep(POLL_SECONDS)
        for rank in self.client.ids:
            self.client.forget(rank)
        self._wait_for_ids([], deadline)
        end(self._processes - family(self._controller_pids()), END_PATIENCE_SECONDS)
        self._background.run(self._cluster.restart_engines(), self.timeout)
        self._wait_for_ids(list(range(self.ranks)), deadline)

    def stop(self, *, keep_logs: bool) -> None:
        """End every process of the cluster, also those that are stuck.

        Args:
            keep_logs: Whether the directory with the logs stays.
        """
        if self._client is not None:
            self._client.close(linger=0)
            self._client = None
        for ranks in self._cluster.engines.values():
            ranks.kill()
        end(self._processes | family(self._controller_pids() + self._engine_pids()), END_PATIENCE_SECONDS)
        try:
            self._background.run(self._cluster.stop_cluster(), self.timeout)
        finally:
            self._background.close()
            registry.forget(self.directory)
            if not keep_logs:
                shutil.rmtree(self.directory, ignore_errors=True)

    def missing(self) -> list[int]:
        """Return the ranks whose engine is gone."""
        present = self.client.ids
        return [rank for rank in range(self.ranks) if rank not in present]

    def check_controller(self) -> None:
        """Check that messages can still arrive.

        Raises:
            ClusterError: The controller has ended, or all ranks have ended at once.
        """
        ended = self._cluster.engine_set.why_all_ended() if self._cluster.engine_set else None
        if ended is not None:
            raise ClusterError(f"the ranks have ended: {ended}; cluster.recover() starts new ones")
        controller = self._cluster.controller
        if controller is None or not is_alive(controller.process):
            raise ClusterError(
                "the cluster's controller has ended; cluster.recover() starts a new one and new ranks"
            )

    def check_files(self) -> None:
        """Check that engines which start now find the controller.

        Raises:
            ClusterError: Something has removed the connection files.
        """
        if not all(map(os.path.exists, self._cluster.controller.connection_files.values())):
            raise ClusterError(f"the connection files in {self.directory} are gone")

    def exit_code(self, rank: int, deadline: float) -> int | None:
        """Return the exit code of the engine of `rank`, negative for a signal, None where it is not known.

        Args:
            rank: The rank. Its nanny has told of its end; the launcher, which knows the code, may be late.
            deadline: When to wait no longer, by `time.monotonic`.
        """
        engines = self._cluster.engine_set
        while True:
            ended = (engines.stop_data or {}).get("engines", {})
            if str(rank) in ended or not hasattr(engines, "launchers") or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        code = ended.get(str(rank), {}).get("exit_code")
        return None if code is None else int(code)

    def _why(self, error: Exception) -> str:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return f"no space is left in {self.directory}"
        if isinstance(error, OSError) and error.filename:
            return f"{error.filename}: {error.strerror}"
        controller = self._cluster.controller
        log = Path(controller.output_file).name if controller else ""
        return f"{last_error(self.directory, log)}; logs are in {self.directory}/log"

    def _controller_pids(self) -> list[int]:
        # A controller that could not be started has no process.
        pid = self._cluster.controller.pid if self._cluster.controller else 0
        return [pid] if pid > 0 else []

    def _engine_pids(self) -> list[int]:
        return [pid for ranks in self._cluster.engines.values() for pid in ranks.pids()]

    def _wait_for_ids(self, ids: list[int], deadline: float) -> None:
        while sorted(self.client.ids) != ids:
            ended = self._cluster.engine_set.why_ended() if ids else None
            if ended is not None:
                raise ClusterError(f"the ranks did not start: {ended}; logs are in {self.directory}/log")
            if time.monotonic() > deadline:
                present = name_ranks(self.client.ids) if self.client.ids else "no rank"
                raise ClusterError(
                    f"{present} answered within {self.timeout:g} s and {len(ids)} were expected; "
                    f"{self._cluster.engine_set.waiting_reason()}logs are in {self.directory}/log"
                )
            time.sleep(POLL_SECONDS)
        self._note_processes()

    def _note_processes(self) -> None:
        self._processes = family(self._controller_pids() + self._engine_pids())
        registry.record(self.profile.name, self.ranks, self._processes, self.directory)
