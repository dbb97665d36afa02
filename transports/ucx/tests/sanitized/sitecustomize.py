"""Remove the finder of an editable installation, which would come before the engine built with a sanitizer."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
