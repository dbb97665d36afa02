"""Remove the import finder of an editable installation, which would find another engine than the sanitized engine."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
