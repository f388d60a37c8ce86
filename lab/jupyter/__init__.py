"""Executing notebooks, serving JupyterLab, and finding what is open to other users."""
