"""``python -m lab``: the ``lab`` command, also as ``torchrun -m lab``."""

from lab.commands.cli import main

if __name__ == "__main__":
    main(prog_name="lab")
