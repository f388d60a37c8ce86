"""Profiles of clusters: refusals, settings of ranks, commands of launchers; and eight ranks of one node."""

import dataclasses
import os
import shlex
import shutil
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from traitlets.config import Config

from cluster import capacity, engine, environment, host, logs
from cluster import permissions as private
from cluster.environment import device_of, rank_environment, share_of_cores
from cluster.errors import ClusterError
from cluster.network import LOOPBACK, interface_of
from cluster.placement import Placement, Start, launcher_placement
from cluster.profiles import PROFILES, find_profile
from cluster.profiles.base import Profile
from cluster.profiles.parsing import parse_fields
from cluster.profiles.showing import describe
from cluster.ranks import Cluster
from cluster.watchdog import ProcessId
from lab.commands.cli import main
from lab.jupyter import security
from lab.jupyter.serving import jupyterlab_arguments
from lab_tests.support.on_ranks import describe_rank, no_process_left

NINE_PORTS = "7300-7308"


@pytest.fixture(autouse=True)
def _everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program, **_: f"/usr/bin/{program}")


def check_refusal(text: str, ranks: int = 2, **settings: Any) -> None:
    with pytest.raises(ClusterError, match=text) as caught:
        Cluster(ranks=ranks, **settings)
    assert "\n" not in str(caught.value)


def test_bad_input_is_one_line_that_says_what_would_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refusal("'sulrm' is not known; known are: local, mpi, node8, slurm, ssh", profile="sulrm")
    check_refusal("'local' has no hosts; it has: numa, variables", hosts=("a",))
    check_refusal(r"hosts='node1': a tuple is needed; hosts=\('node1',\)", profile="ssh", hosts="node1")
    check_refusal(r"ranks=9: .*one node of 8; ranks=8 would work", ranks=9, profile="node8")
    check_refusal(
        r"ranks=3: hosts=.* have 2 slots; hosts=\('node1\*3',\)", ranks=3, profile="ssh", hosts=("a", "b")
    )
    for wrong in ("-oProxyCommand=x", "a*0", "a:b", "a b", ""):
        check_refusal("names no host; 'user@host:22", profile="ssh", hosts=(wrong,))
    check_refusal("key='.*': No such file", profile="ssh", hosts=("a*2",), key=str(tmp_path / "none"))
    check_refusal(r"ranks=3: 2 node\(s\) of 2 ranks give 4; ranks=4", ranks=3, profile="slurm", nodes=2)
    check_refusal("gpus_per_node=2: 4 ranks on a node", ranks=8, profile="slurm", nodes=2, gpus_per_node=2)
    check_refusal("there is no such folder", profile="slurm", folder=str(tmp_path / "none"))
    check_refusal("hostfile=.*: No such file", profile="mpi", hostfile=str(tmp_path / "none"))
    (tmp_path / "hosts").write_text("# two\nnode1 slots=2\nnode2\n")
    check_refusal(
        "ranks=4: .* has 3 slots; ranks=3 would work", ranks=4, profile="mpi", hostfile=f"{tmp_path}/hosts"
    )
    monkeypatch.setattr(shutil, "which", lambda program, **_: None)
    check_refusal(
        "'mpi' needs mpiexec, which is not installed here; Debian has it in openmpi-bin", profile="mpi"
    )
    check_refusal("'slurm' needs sbatch", profile="slurm")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o640)
    check_refusal(
        r"can be read by others \(mode 0640\); chmod 600", profile="ssh", hosts=("a*2",), key=str(key)
    )
    key.chmod(0o600)
    Cluster(ranks=2, profile="ssh", hosts=("a*2",), key=str(key))


def test_an_address_or_a_port_that_cannot_be_had_is_refused() -> None:
    mpi = find_profile("mpi", address="198.51.100.7")
    with pytest.raises(
        ClusterError, match=r"198\.51\.100\.7' is not an address of this machine .*this machine has .*127\.0"
    ):
        mpi.controller_address()
    for wrong in ("7300-7307", "many", "0-20"):
        with pytest.raises(ClusterError, match=r"9 ports are needed; '7000-7008' would work"):
            find_profile("mpi", address=LOOPBACK, ports=wrong).controller_address()
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = f"{port},{NINE_PORTS}"
        with pytest.raises(ClusterError, match=f"ports: {port} of 127.0.0.1 is in use"):
            Cluster(ranks=2, profile="mpi", address=LOOPBACK, ports=ports).start()
    assert find_profile("mpi", address=LOOPBACK, ports=ports).controller_address() == LOOPBACK


@pytest.mark.parametrize("name", PROFILES)
def test_every_controller_encrypts_also_on_loopback(name: str) -> None:
    assert "--IPController.enable_curve=True" in PROFILES[name].controller_arguments()


def test_no_room_for_logs_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    used = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used._replace(free=5 * 2**20 + 1))
    said = rf"{tmp_path} has 5 MiB free and a cluster's logs need 16; TMPDIR"
    with no_process_left(), pytest.raises(ClusterError, match=said):
        Cluster(ranks=2).start()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used)
    with pytest.raises(ClusterError, match=r"no directory for logs can be made in .*: No such file"):
        private.new_directory(str(tmp_path / "none"))


def test_a_connection_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "engine.json"
    file.touch(0o600)
    private.check_private(file)
    file.chmod(0o604)
    with pytest.raises(ClusterError, match=r"can be read by others \(mode 0604"):
        private.check_private(file)
    file.chmod(0o600)
    tmp_path.chmod(0o710)
    with pytest.raises(ClusterError, match=r"its folder 0710"):
        private.check_private(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ssh: connect to host b: Connection refused\r\n", "ssh: connect to host b: Connection refused"),
        ("start\nTraceback:\n  x\nValueError: no room\n\n-----\nbye\n", "ValueError: no room"),
        ("one\ntwo\n", "two"),
        ("", "its log is empty"),
    ],
)  # fmt: skip
def test_the_line_that_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.log").write_text(text)
    assert logs.last_error(tmp_path, "a.log") == said
    assert "cannot be read" in logs.last_error(tmp_path, "b.log")


def test_ranks_over_ssh_take_the_slots_in_order() -> None:
    hosts, variables = ("a*2", "me@b:2200*3", "a"), {"A": "it's"}
    ssh = find_profile("ssh", hosts=hosts, python="/opt/bin/python", variables=variables)
    places = [ssh.start(5, rank).placement for rank in range(5)]
    assert places == [Placement(*place) for place in ((0, 0, 2), (1, 1, 2), (2, 0, 3), (3, 1, 3), (4, 2, 3))]
    assert ssh.start(6, 5).placement == Placement(5, 2, 3)
    assert ssh.start(6, 0).owner is None, "another host sees no process of this one"
    *options, port, host, words = ssh.command(5, 3)
    assert (options[-1], port, host) == ("-p", "2200", "me@b")
    assert shlex.split(words) == ssh.start(5, 3).command("/opt/bin/python")
    assert "BatchMode=yes" in options


def test_a_start_survives_the_command_line() -> None:
    for start in (
        Start(Placement(3, 1, 2), ProcessId(77, "1.25 a"), variables={"A": "b c"}),
        Start(stdin=True, numa=True),
    ):
        assert Start.from_json(start.command("python")[4]) == start


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ("OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 SLURM_PROCID=0",
         Placement(5, 1, 4)),
        ("PMI_RANK=6 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=3", Placement(6, 2, 3)),
        ("PMI_RANK=9 SLURM_PROCID=7 SLURM_LOCALID=0 SLURM_NODEID=3 SLURM_STEP_TASKS_PER_NODE=2(x3),1",
         Placement(7, 0, 1)),
        ("SLURM_PROCID=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=3(x2)", Placement(4, 1, 3)),
        ("SLURM_PROCID=4 SLURM_LOCALID=4 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=5", Placement(4, 4, 5)),
    ],
)  # fmt: skip
def test_what_the_launcher_says(variables: str, place: Placement) -> None:
    assert launcher_placement(dict(part.split("=", 1) for part in variables.split())) == place
    with pytest.raises(ClusterError, match="neither mpiexec nor srun"):
        launcher_placement({})


def test_each_rank_of_a_host_sees_one_gpu() -> None:
    devices = ["5", "GPU-7a", "2"]
    assert [device_of(Placement(10 + k, k, 3), devices) for k in range(3)] == devices
    assert device_of(Placement(3, 1, 2), []) is None
    assert device_of(Placement(3, 1, 2), ["4"]) == "4", "a scheduler that binds shows each its own"
    with pytest.raises(ClusterError, match="rank 12 is number 4 of 4 on its host and sees 3 GPUs; 3 ranks"):
        device_of(Placement(12, 3, 4), devices)


def test_the_variables_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "interface_of", {"10.1.2.3": "eth7", LOOPBACK: "lo0"}.get)
    cores = [{0, 1, 2, 3, 4, 5}] * 2 + [{6, 7, 8}]
    made = rank_environment(Placement(4, 1, 3), ["0", "3", "6"], cores, "10.1.2.3")
    assert {v.name: v.value for v in made} == {
        "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "3", "CUDA_VISIBLE_DEVICES": "3",
        "CLUSTER_ADDRESS": "10.1.2.3", "GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7",
    }  # fmt: skip
    assert all(v.why for v in made)
    assert share_of_cores(Placement(5, 2, 3), cores) == 3
    assert share_of_cores(Placement(0, 0, 5), [{1, 2}] * 5) == 1
    local = rank_environment(Placement(0, 0, 1), [], [{1}], LOOPBACK)
    assert {v.value for v in local if "SOCKET" in v.name} == {"lo0"}


def test_the_variables_of_a_profile_override_those_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    given = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO", "NCCL_NVLS_ENABLE": "7"}
    start = find_profile("node8", variables=given, numa=False).start(2, 1)
    engine.set_environment(start, start.placement, LOOPBACK)
    assert given.items() <= os.environ.items()
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"


def test_loopback_has_an_interface() -> None:
    assert interface_of(LOOPBACK) in psutil.net_if_addrs()
    assert interface_of("198.51.100.9") is None


def test_cores_near_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in enumerate(("0-3,8", "4-7", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(host, "_NODES", tmp_path)
    monkeypatch.setattr(host, "own_cores", lambda: set(range(8)))
    assert host.numa_nodes() == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    low, high = host.numa_nodes()
    assert host.near_cores([], 4) == [low, low, high, high]
    assert host.near_cores([], 3) == [low, low, high]

    pci = tmp_path / "pci" / "0000:81:00.0"
    pci.mkdir(parents=True)
    (pci / "local_cpulist").write_text("4-7\n")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, 00000000:81:00.0'\necho '1, GPU-bb, 00000000:01:00.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(host, "_PCI", tmp_path / "pci")
    assert host.near_cores(["0", "1"], 2) == [high, high]
    assert host.near_cores(["GPU-bb", "GPU-aa"], 2) == [low, high]


def test_the_slurm_job() -> None:
    slurm = find_profile(
        "slurm", partition="gpu", account="me", time="02:00:00", gpus_per_node=8, options=("--exclusive",)
    )
    lines = slurm.script(16, "/x/job.log").splitlines()
    assert lines[0] == "#!/bin/sh"
    assert set(lines[1:-1]) == {
        "#SBATCH --job-name=ranks", "#SBATCH --export=ALL", "#SBATCH --output=/x/job.log",
        "#SBATCH --open-mode=append", "#SBATCH --nodes=2", "#SBATCH --ntasks=16",
        "#SBATCH --ntasks-per-node=8", "#SBATCH --time=02:00:00", "#SBATCH --partition=gpu",
        "#SBATCH --account=me", "#SBATCH --gpus-per-node=8", "#SBATCH --exclusive",
    }  # fmt: skip
    assert lines[-1].startswith("exec srun ")
    assert lines[-1].endswith(shlex.join(slurm.engine(16, 0)))
    assert find_profile("slurm").layout(5) == (1, 5)
    assert find_profile("slurm", ranks_per_node=3).layout(9) == (3, 3)


def settings(profile: Profile) -> dict[str, str]:
    return {variable.name: variable.value for variable in profile.settings()}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_shown_with_its_reasons(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reaching = "address" in {field.name for field in dataclasses.fields(PROFILES[name])}
    profile = find_profile(name, **({"address": LOOPBACK} if reaching else {}))
    text = describe(profile, 2)
    words = " ".join(text.split())
    for field in dataclasses.fields(profile):
        assert f"  {field.name} " in text
        assert " ".join(field.metadata["why"].split()) in words or len(field.metadata["why"]) > 60
    for variable in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", *settings(profile)):
        assert f"  {variable} " in text
    assert all(variable.why for variable in profile.settings())
    assert ("nothing would run: ranks=2: hosts=()" if name == "ssh" else "-m cluster.engine") in text
    assert max(map(len, text.partition("the command that would run")[0].splitlines())) <= 110


def test_show_from_the_command_line() -> None:
    words = ["--ranks", "3", "--set", "hosts=a*2,b", "--set", f"address={LOOPBACK}"]
    shown = CliRunner().invoke(main, ["cluster", "show", "ssh", *words])
    assert shown.exit_code == 0, shown.output
    assert "('a*2', 'b')" in shown.output
    assert '"local_ranks": 2' in shown.output
    wrong = CliRunner().invoke(main, ["cluster", "show", "ssch"])
    assert (wrong.exit_code, wrong.output.count("\n")) == (2, 1)
    assert "known are: local, mpi, node8, slurm, ssh" in wrong.output
    page = CliRunner().invoke(main, ["cluster", "profiles"]).output
    assert all(f"  {name} " in page for name in PROFILES)
    with pytest.raises(ClusterError, match="FIELD=VALUE is needed"):
        parse_fields("local", ["numa"])
    node8 = find_profile("node8", **parse_fields("node8", ["nvls=yes"]))
    assert settings(node8)["NCCL_NVLS_ENABLE"] == "1"
    assert find_profile("slurm", **parse_fields("slurm", ["nodes=3"])).layout(6) == (3, 2)


@pytest.mark.parametrize(
    ("host_", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("*", False), ("", False),
     ("192.0.2.7", False), ("example.org", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_rest(host_: str, loopback: bool) -> None:
    assert security.is_loopback(host_) == loopback


def test_the_doctor_warns_of_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = {"hostname": "127.0.0.1", "token": "t", "password": False, "pid": 7}
    monkeypatch.setattr(security, "list_running_servers", lambda: [closed])
    monkeypatch.setattr(security, "jupyter_config", Config)
    key = tmp_path / "key"
    key.touch(0o600)
    monkeypatch.setattr(security, "private_keys", lambda: [key])
    monkeypatch.setattr(security, "connection_files", list)
    assert list(security.find_exposures()) == []

    for folder in tmp_path.parents:
        if not private.mode(folder) & 0o011:
            monkeypatch.setattr(private, "mode", lambda path, mode=private.mode: mode(path) | 0o011)
    key.chmod(0o644)
    config = Config({"ServerApp": {"ip": "0.0.0.0"}, "IdentityProvider": {"token": ""}})
    monkeypatch.setattr(security, "jupyter_config", lambda: config)
    monkeypatch.setattr(
        security, "list_running_servers", lambda: [{**closed, "hostname": "0.0.0.0"}, {**closed, "token": ""}]
    )
    said = "\n".join(security.find_exposures())
    assert len(said.splitlines()) == 5
    for part in ("process 7 listens on 0.0.0.0", "process 7 asks for no token", "configuration has it listen",
                 "switches its token off", f"private key {key}; chmod 600"):  # fmt: skip
        assert part in said
    config.PasswordIdentityProvider.hashed_password = "argon2:..."
    assert not security.token_is_off(config)


def test_jupyters_configuration_is_read_as_jupyter_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    (tmp_path / "jupyter_server_config.py").write_text("c.ServerApp.ip = '0.0.0.0'")
    (tmp_path / "jupyter_lab_config.json").write_text('{"ServerApp": {"token": ""}}')
    config = security.jupyter_config()
    assert config.ServerApp.ip == "0.0.0.0"
    assert security.token_is_off(config)


def test_open_keeps_its_token_and_its_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    elsewhere = CliRunner().invoke(main, ["open", "--no-browser", "--ip", "198.51.100.7"])
    assert (elsewhere.exit_code, elsewhere.output.count("\n")) == (2, 1)
    assert "--ip 198.51.100.7: " in elsewhere.output
    assert "127.0.0.1 would work" in elsewhere.output
    assert "--ServerApp.ip=127.0.0.1" in jupyterlab_arguments(tmp_path, "a.ipynb")
    (tmp_path / "jupyter_server_config.py").write_text("c.IdentityProvider.token = ''")
    (tmp_path / "jupyter_lab_config.py").write_text("a file that Python cannot read")
    refused = CliRunner().invoke(main, ["open", "--no-browser"])
    assert (refused.exit_code, refused.output.count("\n")) == (2, 1)
    assert "switches its token off" in refused.output


def test_eight_ranks_that_pin_at_once_have_threads_for_it() -> None:
    options = dict(option.split(":") for option in find_profile("node8").allocator.split(","))
    assert options["expandable_segments"] == options["pinned_use_cuda_host_register"] == "True"
    threads = int(options["pinned_num_register_threads"])
    assert threads > 1
    assert threads & (threads - 1) == 0, "torch takes powers of two alone"


@pytest.mark.long
def test_node8_gives_each_of_eight_ranks_its_settings() -> None:
    """Eight CPU ranks stand for eight GPUs: the environment and the numbers are the same."""
    profile = find_profile("node8", variables={"NCCL_DEBUG": "INFO"})
    cores = host.near_cores(capacity.visible_devices(), 8)
    with Cluster(ranks=8, profile="node8", variables={"NCCL_DEBUG": "INFO"}, start_timeout=120) as cluster:
        found = cluster.apply(describe_rank)
    assert [f["engine"] for f in found] == [f["rank"] for f in found] == list(range(8))
    assert [f["cores"] for f in found] == cores
    for rank, f in enumerate(found):
        assert settings(profile).items() <= f["variables"].items()
        assert f["variables"]["NCCL_DEBUG"] == "INFO"
        assert f["variables"]["OMP_NUM_THREADS"] == str(share_of_cores(Placement(rank, rank, 8), cores))
        assert f["variables"]["GLOO_SOCKET_IFNAME"] == interface_of(LOOPBACK)
