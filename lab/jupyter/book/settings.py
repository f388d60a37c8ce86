"""Sphinx's configuration of the book, as data. It names nothing that a reader would need a network for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROJECT = "The long-context lab"

_BRAND = ("color-brand-primary", "color-brand-content", "color-brand-visited")

SETTINGS: dict[str, Any] = {
    "project": PROJECT,
    "extensions": [
        "myst_nb",
        "sphinx.ext.autodoc",
        "sphinx.ext.napoleon",
        "lab.jupyter.book.formulas",
    ],
    # Notebooks are shown as they are stored.
    "nb_execution_mode": "off",
    "nb_render_markdown_format": "myst",
    "nb_code_prompt_show": "Show the solution",
    "nb_code_prompt_hide": "Hide the solution",
    # The headings that a link may name. A link to an anchor that does not exist is a warning.
    "myst_heading_anchors": 3,
    "myst_enable_extensions": ["dollarmath"],
    # Between the dollars of two prices is no formula.
    "myst_dmath_allow_space": False,
    "myst_dmath_allow_digits": False,
    # The sections of docstrings that are not Google's.
    "napoleon_google_docstring": True,
    "napoleon_numpy_docstring": False,
    "napoleon_custom_sections": ["Composes with", "Costs", "Saves", "Source"],
    # Types stand with the arguments, and signatures stay short.
    "autodoc_typehints": "description",
    "autodoc_typehints_description_target": "documented",
    "autodoc_member_order": "bysource",
    "autodoc_preserve_defaults": True,
    # What has single backticks in a docstring is code.
    "default_role": "code",
    "add_module_names": False,
    "python_maximum_signature_line_length": 90,
    "html_theme": "furo",
    "html_title": PROJECT,
    "pygments_dark_style": "a11y-high-contrast-dark",
    "html_theme_options": {
        "light_css_variables": dict.fromkeys(_BRAND, "#0072b2"),
        "dark_css_variables": dict.fromkeys(_BRAND, "#56b4e9"),
    },
    "html_math_renderer": "mathml",
    "html_static_path": [str(Path(__file__).parent / "static")],
    "html_css_files": ["book.css"],
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_show_copyright": False,
    # Two hyphens in text become a dash; quotes stay.
    "smartquotes_action": "D",
}
