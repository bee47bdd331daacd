"""Sphinx configuration. ``make docs`` treats every warning as an error."""

from __future__ import annotations

from minato._distribution import __version__

project = "minato"
author = "The minato authors"
project_copyright = "2026, The minato authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"

html_theme = "furo"
html_title = f"minato {release}"
html_static_path = ["_static"]
html_css_files = ["minato.css"]
