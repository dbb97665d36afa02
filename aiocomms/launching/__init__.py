"""The launcher, which starts the ranks of a job, and replaces a process that dies by a new one.

``aiocomms run`` calls :func:`supervise`. A program that starts ranks itself calls it, too.
"""

from aiocomms.launching.job import Job
from aiocomms.launching.supervisor import supervise

__all__ = ["Job", "supervise"]
