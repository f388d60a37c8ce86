"""Scripts that people have, with a recipe: at most three of their lines change.

``trl/scripts/sft.py`` is the file that TRL installs. The loop of Accelerate has the calls of accelerate's
example of context parallelism, ``nd_parallel.py``.
"""

import json
from collections.abc import Callable
from inspect import getsource
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trl.scripts.sft
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import lab.hf
from cluster.ranks import Cluster
from lab.hf.ranks import fresh_process
from lab.recipe.recipe import Recipe
from lab.step.training_step import gradient_norm
from lab.techniques.rope import apply_rope
from lab_tests.support.small_trainings import VOCABULARY, Case, collate, model, rows, tokenizer
from lab_tests.support.trainers import launch

pytestmark = [
    pytest.mark.long,
    # TRL's default is named by what transformers has renamed.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT asks a model for what transformers is about to call otherwise.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

RANKS = 2

# ---- trl/scripts/sft.py ------------------------------------------------------------------------------------

CHANGED_LINES = {
    "    import transformers\n": "    import lab.hf, transformers\n",
    "    trainer = SFTTrainer(\n": '    trainer = type("Trainer", (lab.hf.LongContext, SFTTrainer), {})(\n',
    "        args=training_args,\n": '        args=lab.hf.arguments(training_args, recipe="upipe"),\n',
}
"""The whole difference between TRL's script and the script with a recipe."""


def sft_script(*, changed: bool) -> ModuleType:
    source = getsource(trl.scripts.sft)
    for line, ours in CHANGED_LINES.items() if changed else ():
        assert source.count(line) == 1, line
        source = source.replace(line, ours)
    made = ModuleType("sft")
    exec(compile(source, "sft.py", "exec"), vars(made))
    return made


def run_sft(folder: Path, words: list[str], *, changed: bool) -> None:
    """Run TRL's script with the words of a command line."""
    script = sft_script(changed=changed)
    parsed = script.make_parser().parse_args_and_config(words, fail_with_unknown_args=False)
    script.main(*parsed)


def command_line(folder: Path, out: Path, *, batch: int, more: tuple[str, ...] = ()) -> list[str]:
    settings = {
        "model_name_or_path": folder / "model", "dataset_name": folder / "data", "output_dir": out,
        "learning_rate": "1e-3", "max_steps": 4, "per_device_train_batch_size": batch, "bf16": "False",
        "gradient_accumulation_steps": 1, "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 1,
        "save_steps": 4, "use_cpu": "True", "report_to": "none", "max_length": 32, "lora_r": 3,
        "per_device_eval_batch_size": 1, "dataset_test_split": "train",
    }  # fmt: skip
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))] + list(more)


PROMPT_ALONE = 1
"""The row of ``write_inputs`` of which nothing is predicted: its one label is that of the first token."""


def write_inputs(folder: Path) -> None:
    """Write a model with its tokenizer, and rows of 13, 17, 9 and 20 tokens."""
    model(Case(dtype="float32")).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    generator, lines = torch.Generator().manual_seed(3), []
    for row, length in enumerate((13, 17, 9, 20)):
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        labels = [ids[0], *[-100] * (length - 1)] if row == PROMPT_ALONE else ids
        lines.append(json.dumps({"input_ids": ids, "labels": labels}))
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def logged(out: Path, name: str) -> list[float]:
    history = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return [log[name] for log in history if name in log]


LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0.0")


@pytest.mark.parametrize("more", [(), LORA], ids=["all parameters", "lora"])
def test_trls_script(more: tuple[str, ...], inputs: Path, ranks4: Cluster, tmp_path: Path) -> None:
    """Its losses, its gradient norms and the files that it writes are those of the script itself.

    One of the four rows has nothing to predict. Its update has a loss of 0.
    """
    with fresh_process(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        run_sft(inputs, command_line(inputs, tmp_path / "plain", batch=1, more=more), changed=False)
    words = command_line(inputs, tmp_path / "ours", batch=1, more=more)
    launch(ranks4, RANKS, run_sft, inputs, words, changed=True)
    losses = {out: logged(tmp_path / out, "loss") for out in ("plain", "ours")}
    assert losses["plain"].count(0.0) == losses["ours"].count(0.0) == 1
    assert losses["ours"] == pytest.approx(losses["plain"], rel=1e-5)
    norms = logged(tmp_path / "plain", "grad_norm")
    assert logged(tmp_path / "ours", "grad_norm") == pytest.approx(norms, rel=1e-4)
    # A row with nothing to predict does not count here. TRL counts it as a row with a loss of 0.
    [evaluated], [with_zero] = (logged(tmp_path / out, "eval_loss") for out in ("ours", "plain"))
    assert evaluated == pytest.approx(with_zero * 4 / 3, rel=1e-5)
    name = "adapter_model.safetensors" if more else "model.safetensors"
    written, plain = (load_file(tmp_path / out / name) for out in ("ours", "plain"))
    torch.testing.assert_close(written, plain, rtol=1e-3, atol=1e-5)


# ---- a loop of Accelerate ----------------------------------------------------------------------------------

STEPS, TOKENS = 3, 22


def batches() -> list[dict[str, Tensor]]:
    """Rows cut out of one text, with labels that are shifted; the last label follows the row."""
    text = torch.randint(1, VOCABULARY, (STEPS, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]} for row in text]


def loop(
    folder: Path, out: Path, precision: str, settings: dict[str, Any], change: Callable[..., Any]
) -> list[float]:
    """Train by the calls of the example; ``change`` is its line with the recipe."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **settings)
    trained = AutoModelForCausalLM.from_pretrained(folder / "model", use_cache=False)
    change(trained, accelerator)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    loader = DataLoader(batches(), batch_size=1)  # type: ignore[arg-type]
    trained, optimizer, loader = accelerator.prepare(trained, optimizer, loader)
    losses = []
    for batch in loader:
        batch["position_ids"] = torch.arange(0, batch["input_ids"].size(1)).unsqueeze(0)
        buffers = [batch[name] for name in ("input_ids", "shift_labels", "labels", "position_ids")]
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1, 1, 1, 1], no_restore_buffers=set(buffers)
        ):
            loss = trained(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    trained.save_pretrained(out)
    accelerator.end_training()
    return losses


def loop_with_a_recipe(folder: Path, out: Path, precision: str) -> list[float]:
    """Runs on ranks."""
    config = lab.hf.parallelism("upipe", RANKS, model=str(folder / "model"))

    def change(trained: Any, accelerator: Accelerator) -> None:
        lab.hf.apply(trained, "upipe", accelerator, tokens=TOKENS)

    return loop(folder, out, precision, {"parallelism_config": config}, change)


@pytest.mark.parametrize(("precision", "near"), [("no", 1e-5), ("bf16", 1e-2)])
def test_a_loop_of_accelerate(
    precision: str, near: float, inputs: Path, ranks4: Cluster, tmp_path: Path
) -> None:
    """``model(**batch).loss`` and ``model.save_pretrained`` are the plain loop's, with shifted labels."""
    with fresh_process():
        plain = loop(inputs, tmp_path / "plain", "no", {}, lambda *_: None)
    assert len(set(plain)) == STEPS
    found = launch(ranks4, RANKS, loop_with_a_recipe, inputs, tmp_path / "ours", precision)
    for losses in found:
        assert losses == found[0]
        assert losses == pytest.approx(plain, rel=near)
        assert (losses == pytest.approx(plain, rel=1e-6)) == (precision == "no")
    written, right = (load_file(tmp_path / out / "model.safetensors") for out in ("ours", "plain"))
    torch.testing.assert_close(written, right, rtol=near, atol=near)


RECIPES = {
    "ddp": Recipe(),
    "ddp, one sequence": Recipe(ulysses=2, head_chunk=4, checkpoint=True),
    "fsdp": Recipe(fsdp=True, loss_tile=7),
}


def whole_batches() -> dict[str, tuple[float, float]]:
    """Return the loss and the norm of the gradients of one whole batch. Runs on ranks."""
    found = {}
    for name, recipe in RECIPES.items():
        with fresh_process():
            config = lab.hf.parallelism(recipe, RANKS)
            accelerator = Accelerator(cpu=True, parallelism_config=config)
            plain = model(Case())
            lab.hf.apply(plain, recipe, accelerator)
            trained = accelerator.prepare(plain)
            row = rows()[0 if recipe.ulysses == RANKS else dist.get_rank()]
            loss = trained(**collate([row]), use_cache=False).loss
            accelerator.backward(loss)
            found[name] = loss.item(), float(gradient_norm(plain))
    return found


def test_a_whole_batch(ranks4: Cluster) -> None:
    """Its loss is the mean over the labels of all ranks, of which each has other rows or a part of one."""
    found = launch(ranks4, RANKS, whole_batches)
    for name, recipe in RECIPES.items():
        plain = model(Case())
        apply_rope(plain)
        loss = plain(**collate(rows()[: RANKS // recipe.ulysses])).loss
        loss.backward()
        for rank in found:
            assert rank[name] == pytest.approx((loss.item(), gradient_norm(plain).item()), rel=1e-6)
