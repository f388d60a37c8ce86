"""The ``lab`` command: its subcommands, and what they print."""
