"""What the fork server imports, of which the processes are forks."""

import ctypes
import gc
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # each process says what they are to it
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the supervisor, if need be amid the next line

from . import decode, prefill, serve  # noqa: E402, F401

gc.freeze()  # no collection in a process touches what it shares with the others
