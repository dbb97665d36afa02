"""An embedding server whose model is split over the ranks of a job."""

import os

# The weights come from a local package, so no library may contact a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
