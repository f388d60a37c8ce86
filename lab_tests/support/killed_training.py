"""A training of two processes that torchrun starts: ``killed_training FOLDER begin``, or ``... resume``.

The first trains without a break, and then once more, until it is killed while it writes a checkpoint.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lab_tests.support.small_trainings import Case, LongTrainer, long_trainer

STEPS, EVERY, KILLED_AT = 6, 2, 4
CASE = Case(dtype="float32", steps=STEPS, settings={"save_strategy": "steps", "save_steps": EVERY})


def killed_there(trainer: LongTrainer, output_dir: str) -> None:
    """Stands for the saving of the optimizer in the checkpoint that is not finished."""
    if trainer.state.global_step < KILLED_AT:
        LongTrainer._save_optimizer_and_scheduler(trainer, output_dir)
        return
    (Path(trainer.args.output_dir).parent / f"killed_{trainer.args.process_index}").touch()
    time.sleep(600)


def losses(trainer: Any) -> dict[int, float]:
    return {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    trainer = long_trainer(CASE, folder / ("whole" if what == "begin" else "broken"))
    trainer.train(resume_from_checkpoint=what == "resume")
    if os.environ["RANK"] == "0":
        (folder / f"{what}.json").write_text(json.dumps(losses(trainer)))
    if what == "begin":
        broken = long_trainer(CASE, folder / "broken")
        broken._save_optimizer_and_scheduler = lambda output_dir: killed_there(broken, output_dir)
        broken.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
