"""An embedding server whose model is split over the ranks of a job."""

import os

# The weights come from a package on this machine: no library underneath may ask a model hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
