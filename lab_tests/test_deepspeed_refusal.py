"""Where DeepSpeed's operator cannot be compiled, the refusal is one line, whatever the compiler wrote."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lab.errors import RecipeError
from lab.techniques import deepspeed


def test_the_compilers_pages_are_left_out(monkeypatch, tmp_path):
    def fails(**_):
        raise RuntimeError("Error building extension 'comm': [1/3] c++ -MMD\nc++: not found\n[2/3] c++")

    stub = ModuleType("deepspeed")
    stub.comm = SimpleNamespace(is_initialized=lambda: False)
    accelerator = ModuleType("accelerator")
    builder = SimpleNamespace(load=fails)
    accelerator.get_accelerator = lambda: SimpleNamespace(create_op_builder=lambda _: builder)
    held = ModuleType("ulysses_sp")
    held.UlyssesSPAttentionHF = object
    monkeypatch.setitem(sys.modules, "deepspeed", stub)
    monkeypatch.setitem(sys.modules, "deepspeed.comm", stub.comm)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", accelerator)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.sequence_parallel.ulysses_sp", held)
    monkeypatch.setattr(deepspeed.dist, "get_backend", lambda: "gloo")
    with pytest.raises(RecipeError) as refused:
        deepspeed._attention_class(torch.device("cpu"))
    assert str(refused.value).endswith("(Error building extension 'comm'); use ulysses_backend='lab'")
    assert "\n" not in str(refused.value)
