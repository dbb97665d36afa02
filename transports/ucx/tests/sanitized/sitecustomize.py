"""For a Python that is to import the engine built with a sanitizer: an editable installation would come first."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
