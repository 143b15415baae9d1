"""Settings of the documentation site, built by ``make docs`` without a network.

The source folder is the checkout, not ``docs/``: README, CONTRIBUTING and the pages beside the code are part
of the site, and a relative link is right both in the checkout and on the site.
"""

project = "liteboost_adaptor"
author = "liteboost_adaptor contributors"
project_copyright = author  # no year: pages are the same whenever they are built

extensions = ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docs/**",
    "kernels/README.md",
    "examples/custom_op/README.md",
    "examples/ray/README.md",
    "tests/cann_sim/README.md",
]
exclude_patterns = [".*", "build", "dist", "docs/site"]

# Pages of the API come from docstrings, read without importing: neither torch nor the kernels are needed.
autoapi_dirs = ["liteboost_adaptor"]  # relative to the source folder
autoapi_ignore = ["*/_native/*", "*/kernels/*", "*/patches/*"]
autoapi_generate_api_docs = False  # docs/api says what is public
autoapi_add_toctree_entry = False
suppress_warnings = ["autoapi.python_import_resolution"]  # names that modules outside of docs/api import
autodoc_typehints = "signature"
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # autoapi describes attributes, too
napoleon_custom_sections = ["Numerics", "Source"]

myst_heading_anchors = 4  # links to headings are checked, too
highlight_language = "none"  # a block in no language is one of the shell, or a diagram

html_theme = "furo"
html_title = project
html_extra_path = ["site"]  # index.html of the site leads to that of docs/
html_copy_source = False
