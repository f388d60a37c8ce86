"""The subcommands of ``lab``, one file for each subject.

A file lists its subcommands in ``COMMANDS``, and `lab.commands.cli` adds those of every file. ``lab --help``
imports all files, so each subcommand imports what it needs only when it runs.
"""
