"""What the fork server imports, of which the ranks are forks."""

import ctypes
import gc
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # they are for the ranks; each lets them in
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the supervisor, if need be amid the next line

from . import rank  # noqa: E402, F401

gc.freeze()  # no collection in a rank touches what it shares with the others
