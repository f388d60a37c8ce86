"""Notebooks: executing them, serving JupyterLab, and what a server leaves open to others."""
