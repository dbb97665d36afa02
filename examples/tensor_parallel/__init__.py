"""A transformer whose linear layers are split over the ranks of a job, awaited from an async handler."""

import os

# The weights come from a local package, so no library may contact a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
