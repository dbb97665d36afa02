"""The launcher: starts the ranks of a job, and a new process in the place of one that dies.

:func:`supervise` is what ``aiocomms run`` calls, and what a program calls that starts ranks itself.
"""

from aiocomms.launching.job import Job
from aiocomms.launching.supervisor import supervise

__all__ = ["Job", "supervise"]
