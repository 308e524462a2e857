"""Sphinx configuration of the site, with MyST. `nox -s docs` builds it, with warnings as errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_tools"))
import kvref
from generate_spec_pages import write_pages
from kvref_conformance.report.player_element import SCRIPTS, STATIC, STYLES
from player_traces import write_traces
from sphinx_ext.player import TRACES

project, author, release = "kvref", "the kvref authors", kvref.__version__
copyright = "the kvref authors, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
extensions += [f"sphinx_ext.{name}" for name in ("mathml", "patch_accessibility", "player", "rewrite_sources")]
# The last two are inside the pages of the matrix.
exclude_patterns = ["_build", "_matrix", "results", "spec/_*", "**/checks", "**/.kvref"]

html_theme = "furo"
html_title = f"kvref {release}"
html_static_path = ["_static", str(STATIC)]
html_css_files = ["site.css", *STYLES]
html_js_files = [(script, {"defer": "defer"}) for script in SCRIPTS]
html_extra_path = ["results", "_matrix"]  # measured results, and the report generated from them
html_show_sphinx = False
html_copy_source = False
html_use_index = html_domain_indices = False
html_search_scorer = str(Path(__file__).parent / "_tools/search_scorer.js")
html_theme_options = {"top_of_page_buttons": []}

html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # arrays are Any: shapes and dtypes are in the docstrings
copybutton_exclude = ".linenos, .gp, .go"


def setup(app):
    docs = Path(__file__).parent
    write_pages(docs)
    write_traces(docs / TRACES)
