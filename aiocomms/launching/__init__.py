"""The launcher, which starts the ranks of a job, and can replace a dead process by a new process.

``aiocomms run`` calls :func:`supervise`. A program can also call :func:`supervise` to start ranks.
"""

from aiocomms.launching.job import Job
from aiocomms.launching.supervisor import supervise

__all__ = ["Job", "supervise"]
