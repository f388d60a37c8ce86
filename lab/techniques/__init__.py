"""The road, one technique a file; ``lab/step/compose.py`` says in which order they stack."""
