"""The ``lab`` command's subcommands, a file for each kind; heavy imports stay inside them."""
