"""The table of devices, and the memory that CUDA takes and a meter does not see."""

import json
import os
from math import inf, nan

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lab
from lab.errors import LabError
from lab.planning import cuda_workspace as workspace_model
from lab.planning import hardware as table
from lab.planning import scaling
from lab.planning.cuda_workspace import (
    cuda_workspace,
    fixed_workspace,
    flash_backward_workspace,
    matrix_products_workspace,
    rounded,
)
from lab.planning.hardware import HARDWARE, Figure, hardware, nearest, of_name
from lab.recipe.recipe import Recipe
from lab.techniques.attention.matrix_products import exact_backward, exact_forward
from lab.units import GiB, MiB
from lab_tests.support.memory_events import peak_of_events
from lab_tests.support.models import small_config

FIGURES = {
    **{f"{d}.{n}": f for d, h in HARDWARE.items() for n, f in vars(h).items() if isinstance(f, Figure)},
    **{
        n: f
        for module in (table, workspace_model)
        for n, f in vars(module).items()
        if isinstance(f, Figure) and not n.startswith("_")
    },
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_unit_and_a_source(name):
    figure = FIGURES[name]
    assert figure.unit in ("FLOP/s", "B/s", "B", "1")
    assert len(figure.source.split()) > 2
    assert figure.value > 0
    if name.endswith("_share"):
        assert figure.unit == "1"
        assert figure.value < 1


def test_every_field_of_a_device_is_a_figure():
    devices = "a100 h100 h200 gh200 b200 b300 gb200 mi300x l40s rtx4090 rtx5090"
    assert set(HARDWARE) == {*devices.split()}
    for device in HARDWARE.values():
        others = [n for n, f in vars(device).items() if not isinstance(f, Figure)]
        assert others == ["name", "kernel", "kernels"]
        assert (device.disk_write, device.disk_read) == (
            hardware("h100").disk_write,
            hardware("h100").disk_read,
        )
    assert len(FIGURES) == 11 * 17 + 7
    assert len({device.name for device in HARDWARE.values()}) == 11


def test_what_a_device_takes_from_another_says_so():
    """A source that two devices give for one field was measured on one of them at most."""
    for field in vars(HARDWARE["h100"]).keys() - {"name", "kernel", "kernels", "disk_write", "disk_read"}:
        sources = [vars(device)[field].source for device in HARDWARE.values()]
        for source in sources:
            assert sources.count(source) == 1 or "assumed" in source, (field, source)


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA B200", "b200"), ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"), ("NVIDIA GB300", None), ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"), ("NVIDIA L40S", "l40s"), ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"), ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)  # fmt: skip
def test_torchs_names_of_devices(torch_name, name):
    assert of_name(torch_name) == name
    assert nearest(torch_name) == (name or "rtx4090")


def test_the_links_of_a_device():
    """NVLink-C2C to the host is several times PCIe; a card without NVLink sends over its PCIe link."""

    def host_rate(name):
        return hardware(name).host_link.value * hardware(name).host_link_share.value

    for superchip, sibling in (("gh200", "h200"), ("gb200", "b200")):
        assert "NVLink-C2C" in hardware(superchip).host_link.source
        assert host_rate(superchip) > 6 * host_rate(sibling)
    for name in ("l40s", "rtx4090", "rtx5090"):
        assert hardware(name).link.value == hardware(name).host_link.value
        assert "no NVLink" in hardware(name).link.source


def test_an_unknown_device_is_refused_in_one_line():
    assert hardware("h100").name == "NVIDIA H100 SXM 80GB"
    names = "a100, b200, b300, gb200, gh200, h100, h200, l40s, mi300x, rtx4090, rtx5090"
    with pytest.raises(
        LabError, match=rf"^no device named 'v100': the table has {names}; a file of `lab bench"
    ):
        hardware("v100")
    with pytest.raises(LabError, match="no device named 'H100'"):
        lab.plan("tiny", "plain", tokens=64, ranks=1, device="H100")


def test_the_rates_of_kernels_by_length():
    """Between two lengths they follow the logarithm of the length; seen red with the length itself."""
    h100 = hardware("h100")
    rates = h100.kernels["cudnn"]
    assert rates.tokens == (2**16, 2**18, 2**20)
    at = {n: h100.with_kernel("cudnn", n) for n in (4096, 2**16, 2**17, 2**18, 2**20, 5 * 2**20)}
    forward = {n: device.attention_forward.value for n, device in at.items()}
    assert [forward[n] for n in rates.tokens] == [*rates.forward]
    assert forward[2**17] == pytest.approx((rates.forward[0] + rates.forward[1]) / 2)
    assert (forward[4096], forward[5 * 2**20]) == (rates.forward[0], rates.forward[2])
    assert at[2**20].attention_backward == Figure(rates.backward[2], "FLOP/s", rates.source)
    assert (at[4096].kernel, at[4096].matmul) == ("cudnn", h100.matmul)
    # The rate of FlashAttention-3 at one length is that of all.
    assert h100.with_kernel("auto", 4096) == h100.with_kernel("flash-attn-3", 2**20) == h100
    assert hardware("a100").kernels == {}
    assert (
        hardware("h200")
        .kernels["torch"]
        .source.startswith("as the H100, the same cores and links: lab bench")
    )


OF_KERNEL = {"tokens": [64, 128], "forward": [1e12, 2e12], "backward": [3e12, 4e12], "source": "here"}
ENTRIES = {
    "name": "mine", "like": "h100", "why": "not measured", "kernel": "torch", "kernels": {"torch": OF_KERNEL},
}  # fmt: skip


def test_a_file_is_a_device(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(ENTRIES | {"host_link": {"value": 7e9, "source": "copied here"}}))
    mine, h100 = hardware(str(file)), hardware("h100")
    assert (mine.name, mine.kernel, mine.host_link.value) == ("mine", "torch", 7e9)
    assert mine.memory.value == h100.memory.value
    assert mine.memory.source == f"not measured: {h100.memory.source}"
    assert mine.with_kernel("auto", 128).attention_backward.value == 4e12
    plan = lab.plan("tiny", "offload", tokens=128, ranks=2, device=str(file))
    slow = lab.plan("tiny", "offload", tokens=128, ranks=2, device="h100")
    assert plan.costs.host_seconds > 5 * slow.costs.host_seconds
    file.unlink()
    assert (plan.device, plan.mfu > 0) == ("mine", True)


def of_kernel(**changes):
    return {"kernels": {"torch": OF_KERNEL | changes}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"matmull": 1}, "it has matmull"), ({"name": 3}, "name is no text"),
        ({"name": ""}, "name is no text"),
        ({"name": "a\x1bb"}, "name is no text"), ({"name": "\ud800"}, "name is no text"),
        ({"why": None}, "why is no text"), ({"like": "v100"}, "like is not one of a100, b200"),
        ({"kernel": "cudnn"}, "lack that of kernel"),
        ({"kernel": "x", "kernels": {"x": OF_KERNEL}}, "other names"),
        ({"kernels": {}}, "lack that"), ({"kernels": None}, "another form"),
        ({"kernels": {"torch": 3}}, "another form"),
        (of_kernel(tokens=[128, 64]), "no lengths"), (of_kernel(tokens=[64, 64]), "torch has no lengths"),
        (of_kernel(tokens=[128]), "no lengths"), (of_kernel(tokens=[True, 5]), "no lengths"),
        (of_kernel(tokens=[], forward=[], backward=[]), "no lengths"), (of_kernel(more=1), "no lengths"),
        (of_kernel(forward=[0, 1]), "no rate or length"), (of_kernel(forward=[inf, 9]), "no rate or length"),
        (of_kernel(forward=[10**400, 1]), "no rate or"), (of_kernel(tokens=[64, 2**70]), "no rate or length"),
        (of_kernel(forward=["1", "2"]), "no rate or length"), (of_kernel(source="{x}"), "a brace"),
        (of_kernel(source=None), "another form"),
        ({"matmul": 1}, "another form"),
        ({"matmul": {"value": -1, "source": ""}}, "matmul has no value from 1 to"),
        ({"matmul": {"value": nan, "source": ""}}, "matmul has no value"),
        ({"matmul": {"value": True, "source": ""}}, "matmul has no value"),
        ({"matmul": {"value": 1e12, "source": "", "times": 2}}, "matmul has no value"),
        ({"matmul": {"like": "h100.memory", "why": ""}}, "an entry lacks value"),
        ({"matmul": {"value": 1e12, "source": "{0}"}}, "matmul has no value"),
        ({"matmul": {"value": 1e12, "source": None}}, "another form"),
        ({"matmul_share": {"value": 1e-300, "source": ""}}, "matmul_share has no value from 1e-06 to 100"),
        ({"copy_slowdown": {"value": -1, "source": ""}}, "copy_slowdown has no value from 0 to 100"),
        ({"memory": {"value": 1e300, "source": ""}}, "memory has no value from 1 to 1e.18"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_device_is_refused_in_one_line(tmp_path, changes, why):
    refused(tmp_path, json.dumps(ENTRIES | changes), why)


def test_a_cpu_has_no_workspace_of_cuda(tmp_path):
    """Seen red: notes on CUDA, and the bytes of its context, in plans for a CPU."""
    file = tmp_path / "cpu.json"
    for name in ("CPU", "GPU X"):
        file.write_text(json.dumps(ENTRIES | {"name": name}))
        plan = lab.plan("tiny", "plain", tokens=64, ranks=1, device=str(file), compute_dtype=None)
        assert plan.machine.workspace == (plan.reserved_peak() is not None) == (name != "CPU")
        assert any("CUDA" in note for note in plan.notes) == (name != "CPU")


def refused(folder, text, why):
    file = folder / "mine.json"
    file.write_text(text)
    said = rf"mine\.json has no device, because .*{why}.*: `lab bench machine .* writes one$"
    with pytest.raises(LabError, match=said):
        lab.plan("tiny", "plain", tokens=64, ranks=1, device=str(file))


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "it is not JSON"), ("[]", "another form"), ("[" * 99999, "it is not JSON"), ("3", "another form")],
)
def test_a_text_that_is_no_device_is_refused(tmp_path, text, why):
    refused(tmp_path, text, why)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for name in (tmp_path / "no.json", tmp_path / "pipe.json", "a\0.json", tmp_path):
        with pytest.raises(LabError, match=r"has no device, because there is no such file|no device named"):
            hardware(str(name))


@pytest.mark.parametrize(("nbytes", "block"), [(0, 0), (1, 512), (512, 512), (513, 1024), (5 * GiB, 5 * GiB)])
def test_blocks_come_in_512_bytes(nbytes, block):
    assert rounded(nbytes) == block


def test_flash_backward_by_hand():
    # b=2, h=12, S=200 -> 256, D=10 -> 16 -> 32 for dq; K=6, S'=130; out lies as another layout: one copy.
    dq, sums = 4 * 2 * 12 * 256 * 32, 4 * 2 * 12 * 256
    dk = dv = 2 * 2 * 12 * 130 * 16  # 99840 = 195 * 512
    copied = 2 * 2 * 12 * 200 * 16
    assert flash_backward_workspace(2, 12, 6, 200, 130, 10) == dq + sums + dk + dv
    assert flash_backward_workspace(2, 12, 12, 200, 130, 10) == dq + sums
    assert flash_backward_workspace(2, 12, 6, 200, 130, 10, copies=1) == dq + sums + dk + dv + copied
    # dq's head_dim goes up to 32 (96 stays 96), above 128 to 64 (160 -> 192).
    assert flash_backward_workspace(1, 1, 1, 128, 128, 96) == 4 * 128 * 96 + 4 * 128
    assert flash_backward_workspace(1, 1, 1, 128, 128, 160) == 4 * 128 * 192 + 4 * 128


def held_inside(attend):
    """The most bytes that a call holds besides its results, by the profiler; and its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = attend()
    return peak_of_events(profiler) - sum(t.nbytes for t in results), results


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "queries", "keys", "head_dim", "dtype"),
    [
        (1, 4, 2, 2560, 2560, 8, torch.float32),
        (1, 3, 3, 2500, 2500, 10, torch.float64),
        (2, 2, 1, 600, 2100, 8, torch.float32),
        (3, 4, 2, 300, 1300, 12, torch.float64),
        (1, 2, 2, 2560, 2560, 288, torch.bfloat16),
        (2, 4, 2, 512, 1100, 288, torch.bfloat16),
        (1, 2, 2, 1024, 1024, 520, torch.float32),
        (1, 2, 1, 200, 200, 24, torch.float32),
    ],
)
def test_matrix_products_hold_what_the_model_says(
    rows, heads, kv_heads, queries, keys, head_dim, dtype, joined
):
    def make(n, tokens):
        # Heads lie as [b, h, S, D], or as [b, S, h, D], whose rows a product of k or of v joins by a copy.
        shape = (rows, n, tokens, head_dim) if joined else (rows, tokens, n, head_dim)
        x = torch.randn(shape).to(dtype)
        return x if joined else x.transpose(1, 2)

    q, dout = make(heads, queries), make(heads, queries)
    k, v = make(kv_heads, keys), make(kv_heads, keys)
    settings = {"causal": queries == keys, "scale": 0.3}
    forward, (out, lse) = held_inside(lambda: exact_forward(q, k, v, **settings))
    backward, _ = held_inside(lambda: exact_backward(dout, q, k, v, out, lse, **settings))
    kernel = cuda_workspace(1).kernel
    op = "aten._scaled_dot_product_flash_attention_for_cpu"
    said = kernel(op, (q, k, v)), kernel(f"{op}_backward", (dout, q, k, v, out, lse))
    wide = max(q.itemsize, 4)
    # The model has up to three blocks of queries. With a causal mask, the last full block does not see the
    # keys of a block after it that is not full.
    slack = 4 * wide * rows * heads * min(queries, 256) * (head_dim + 4)
    short = queries % 256 * (queries == keys)
    slack += 2 * wide * rows * heads * 256 * short + 3 * wide * rows * kv_heads * short * head_dim
    if queries <= 256:
        slack += wide * rows * kv_heads * keys * head_dim
    for measured, planned in zip((forward, backward), said, strict=True):
        assert 0 <= planned - measured <= slack


def test_matrix_products_by_hand():
    # b=2, h=6, S=1000, K=3, S'=512, D=16: matrices of 256 queries.
    scores, of_keys, block, rows = 4 * 12 * 256 * 512, 4 * 6 * 512 * 16, 4 * 12 * 256 * 16, 4 * 12 * 256
    sizes = {"width": 4, "copies": 0}
    assert (
        matrix_products_workspace(2, 6, 3, 1000, 512, 16, **sizes, backward=False) == 2 * scores + 3 * block
    )
    assert matrix_products_workspace(2, 6, 3, 1000, 512, 16, **sizes, backward=True) == (
        2 * scores + of_keys + 3 * block + rows
    )
    # In bf16 the sums of dk and dv are wider than they are.
    wider = matrix_products_workspace(2, 6, 3, 1000, 512, 288, width=2, copies=1, backward=True)
    assert wider == 2 * scores + 18 * 2 * of_keys + 18 * 3 * block + rows


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_the_bytes_of_matrix_products_are_affine_in_the_keys(copies):
    """Seen red: the larger of two terms that crossed, at 778 keys of a head of 512."""

    def held(keys, backward):
        return matrix_products_workspace(1, 8, 4, 1000, keys, 512, width=4, copies=copies, backward=backward)

    for backward in (False, True):
        assert held(4096, backward) - held(2048, backward) == 4 * (held(768, backward) - held(256, backward))


def test_a_plan_counts_matrix_products_at_their_operator():
    cuda, seen = (
        lab.plan(wide_attention(), Recipe(), tokens=2000, ranks=1, workspace=on).timeline
        for on in (True, False)
    )
    op = "aten._scaled_dot_product_flash_attention_for_cpu"
    for name, backward in ((op, False), (f"{op}_backward", True)):
        inside = matrix_products_workspace(1, 24, 6, 2000, 2000, 10, width=4, copies=0, backward=backward)
        more = [
            max(t.moment(i).by_category["other"] for i in range(len(t)) if t.moment(i).op == name)
            for t in (cuda, seen)
        ]
        assert more[0] - more[1] == fixed_workspace(1) + inside
    assert cuda.peak.op == f"{op}_backward"


def test_the_fixed_part_grows_with_the_ranks_of_a_node():
    sizes = [fixed_workspace(ranks) for ranks in (1, 2, 4, 8)]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == int(0.92 * GiB + 64 * MiB)
    assert sizes[3] - sizes[2] == 4 * 32 * 12 * MiB
    assert fixed_workspace(64) == sizes[3]


def wide_attention():
    return small_config(intermediate_size=56, num_attention_heads=24, vocab_size=104)


def both(**knobs):
    return [
        lab.plan(wide_attention(), Recipe(**knobs), tokens=200, ranks=2, workspace=on).timeline
        for on in (True, False)
    ]


def test_at_the_peak_a_plan_adds_the_fixed_part_and_the_kernels_own(monkeypatch):
    monkeypatch.setattr(scaling, "BLOCK", Figure(1, "B", "nothing is rounded here"))
    cuda, seen = both(checkpoint=True, compute_dtype="bfloat16")
    assert seen.peak.op == cuda.peak.op == "aten._scaled_dot_product_flash_attention_for_cpu_backward"
    own = flash_backward_workspace(1, 24, 6, 200, 200, 10)
    assert cuda.device_peak - seen.device_peak == fixed_workspace(2) + own
    assert cuda.peak.by_category["other"] - seen.peak.by_category["other"] == fixed_workspace(2) + own
    assert cuda.host_peak == seen.host_peak


def test_at_the_first_row_a_plan_adds_the_rounding_of_every_storage():
    cuda, seen = both(fsdp=False)
    model = lab.models.build(wide_attention())
    lost = [rounded(p.nbytes) - p.nbytes for p in model.parameters()]
    counters = len(lost) * (rounded(4) - 4)
    held = cuda.moment(0).by_category
    assert held["other"] - seen.moment(0).by_category["other"] == fixed_workspace(2)
    assert held["optimizer"] - seen.moment(0).by_category["optimizer"] == 2 * sum(lost) + counters
    tables = [rounded(b.nbytes) - b.nbytes for b in model.buffers() if b.dtype is torch.float32]
    assert held["parameters"] - seen.moment(0).by_category["parameters"] == sum(lost) + sum(tables)
