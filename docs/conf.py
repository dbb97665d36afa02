"""How Sphinx makes the site: ``make docs``. Why Sphinx, and this theme: docs/decisions.md, "The site"."""

from __future__ import annotations

import os
from pathlib import Path

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import aiocomms

ROOT = Path(__file__).parents[1]

project = "aiocomms"
project_copyright = "the aiocomms authors"
author = "the aiocomms authors"
release = aiocomms.__version__
version = ".".join(release.split(".")[:2])

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
]
suppress_warnings = ["myst.header"]  # a page may begin at the level that GitHub shows best

# ------------------------------------------------------------------------------------------------------------ pages

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
"""Links to headings are GitHub's, so that one file reads well in both places."""
myst_links_external_new_tab = False

# ------------------------------------------------------------------------------------------- reference, by docstrings

autodoc_default_options = {"member-order": "bysource", "exclude-members": "__init__, __new__"}
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
"""Most objects are made by functions: a page of docs/api that shows a constructor too excludes nothing."""
autodoc_preserve_defaults = True
autodoc_mock_imports = ["cupy", "ray"]
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"
highlight_language = "python"
nitpicky = True
# Of other libraries, whose inventories would have to be asked of their sites; and type variables, which are no names.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(_thread|anyio|asyncio|collections|concurrent|contextlib|datetime|msgspec|opentelemetry|os|pathlib"
        r"|prometheus_client|socket|threading|time|torch|types|typing)\..*",
    ),
    (r"py:class", r"(.*\.)?(_?T(_co)?|_P|_R|Given)"),
]
nitpick_ignore = [("py:class", name) for name in ("Store", "Tensor", "Timeout")]
nitpick_ignore += [("py:mod", name) for name in ("buffers", "clock")]  # modules that the toolkit exports by these names
# Of aiocomms every name must be there, but for what nobody makes or holds, and only signatures name.
nitpick_ignore += [
    ("py:class", f"aiocomms.{name}")
    for name in (
        "blocking.loop_thread.LoopThread",
        "lowlevel.clock.Simulation",
        "lowlevel.jobstore.JobStore",
        "lowlevel.memory.Holder",
        "ops.checks.CheckedComm",
        "communicator.portal.door.Door",
        "transport.native.Line",
        "transport.native.Shortcuts",
        "integrations.torch_backend.completer.Completer",
        "integrations.torch_backend.forms.How",
        "integrations.torch_backend.ranges.WorkRange",
    )
]


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element) -> Element | None:
    """Lead a name to where it is public: an annotation says ``aiocomms.progress.work.Work`` of ``aiocomms.Work``."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    parts = node["reftarget"].split(".")
    for short in (".".join(parts[-2:]), parts[-1]):
        found = {name for name, _ in domain.find_obj(env, "", "", short, None, 1)}
        best = found & {f"aiocomms.{short}"} or found
        if len(best) == 1:
            place = domain.objects[best.pop()]
            return make_refnode(app.builder, node["refdoc"], place.docname, place.node_id, content)
    return None


def shown(
    app: Sphinx, what: str, name: str, given: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A signature as it is shown: ``new_comm`` is a class that is called like a function, and does not return None."""
    return signature, None if isinstance(given, type) else returns


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-signature", shown)


# ------------------------------------------------------------------------------------------------------------- looks

html_domain_indices = False
html_theme = "pydata_sphinx_theme"
html_title = "aiocomms"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
templates_path = ["_templates"]
html_theme_options = {
    "logo": {
        "text": "aiocomms",
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
        "alt_text": "aiocomms",
    },
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "show_nav_level": 1,
    "navigation_depth": 2,
    "back_to_top_button": False,
    "navbar_end": ["version-switcher", "theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_version_warning_banner": True,
    "switcher": {
        "json_url": os.environ.get("DOCS_URL", "/") + "switcher.json",  # docs/site.py writes it
        "version_match": "dev" if "dev" in release else version,
    },
    "check_switcher": False,
}
html_sidebars = {"index": [], "tutorial": []}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
