"""Loss and every gradient of the named recipes in fp32 and in bf16. ``test_cases.py`` has fp64."""

import pytest
import torch

from lab.recipe.ladder import RUNGS, resolve_recipe
from lab_tests.support.parity import TOKENS, plain_result, relative_errors, save_checkpoint
from lab_tests.support.recipes import EVERYTHING
from lab_tests.support.reference import build, config, error

pytestmark = pytest.mark.long


def test_loss_and_gradients_in_single_precision(ranks4, tmp_path):
    save_checkpoint(tmp_path, "llama", 24, 6, dtype=torch.float32)
    work = {name: resolve_recipe(name, str(tmp_path), 4, TOKENS, compute_dtype=None) for name in RUNGS}
    work["everything"] = EVERYTHING
    for rank in ranks4.apply(relative_errors, [(str(tmp_path), recipe) for recipe in work.values()]):
        assert {
            name: max(errors) for name, errors in zip(work, rank, strict=True) if max(errors) > 5e-6
        } == {}


def test_bf16_is_at_most_half_again_as_far_from_fp32_as_plain_bf16(ranks4, tmp_path):
    """Parameters in fp32, forward and backward in bf16; the plain model has its parameters rounded."""
    for family in ("llama", "qwen3"):
        folder = tmp_path / family
        folder.mkdir()
        save_checkpoint(folder, family, 24, 6, dtype=torch.float32)
        truth = torch.load(folder / "expected.pt")
        plain = plain_result(build(config(family), torch.float32).to(torch.bfloat16))
        own_error = error(plain[1], truth[1])
        rungs = [resolve_recipe(name, str(folder), 4, TOKENS) for name in RUNGS]
        assert {recipe.compute_dtype for recipe in rungs} == {"bfloat16"}
        for name, (_, gradient) in zip(
            RUNGS, ranks4.apply(relative_errors, [(str(folder), recipe) for recipe in rungs])[0], strict=True
        ):
            assert 1e-4 < gradient < 1.5 * own_error, (family, name)
