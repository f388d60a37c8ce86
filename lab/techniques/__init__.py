"""The road, one technique a file; ``lab/compose.py`` says in which order they stack."""
