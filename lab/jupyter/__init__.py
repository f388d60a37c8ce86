"""Executing notebooks, serving JupyterLab, building the book, and finding what is open to other users."""
