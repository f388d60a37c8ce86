"""The branches for CUDA run on fake tensors, where torch's CUDA build has no driver."""

import subprocess
import sys

import pytest
import torch

from lab_tests.fake_cuda import CASES


@pytest.mark.long
@pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA: bash lab_tests/fake_cuda.sh does")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these branches itself")
def test_every_recipe_runs_on_fake_cuda_tensors():
    run = subprocess.run([sys.executable, "-m", "lab_tests.fake_cuda"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == len(CASES)
