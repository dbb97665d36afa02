"""The tools for authors of transports. The modules ``errors``, ``ops``, ``transport`` and ``cuda`` have other tools.

======================================= ================================================================================
to wake the loop from any thread        :class:`Waker`; :class:`Inbox`, which also passes calls to the loop
to make blocking calls off the loop     :func:`run_in_thread`; :func:`call_in_thread`, if the caller cannot await;
                                        :func:`load_libraries`, before an import that loads libraries
to read the time                        :mod:`clock`: ``clock.now()``, ``clock.wall()``, ``clock.event()`` for threads;
                                        always write ``clock.`` in front
to find the other ranks                 :func:`host_id`, :func:`reachable_address`, :data:`LOOPBACK`
to connect to the other ranks           :func:`listen_at`; :func:`tune`, for a connection; :class:`Gate`, for sockets
                                        of any kind; :func:`same_user`, for unix sockets
to authenticate in other ways           :func:`mac` and :func:`same`, with a key of :meth:`Rendezvous.secret`;
                                        :func:`check_exposed`, before listening; :data:`MAX_RECORD`
to pass no descriptor to children       :func:`closed_on_exec`
to make a buffer                        :mod:`buffers`, on which the program's torch modes have no effect;
                                        :func:`unaffected`, for other code outside ``post`` and ``progress``
to check that a tensor fits its memory  :func:`has_room`
to move memory safely                   :func:`in_use`; :func:`register`, for an object (not an op) that uses memory
to copy a message within a process      :func:`copy_message`
to close connections in a forked child  :class:`Unshared`
to make a call before Python ends       :func:`at_end`
to distinguish versions of a protocol   :class:`Dialect` and :data:`HEAD_BYTES`, which precede all other bytes
to send control messages to ranks       :class:`ControlCodec`
to use a store                          :func:`serve_store`, :func:`reach_store`, :func:`admitting`,
                                        :func:`store_errors`
to raise errors as all transports do    :func:`closed_by`, :func:`gone`, :func:`misfit`, :func:`disagreement`,
                                        :class:`Reason`
======================================= ================================================================================

Import these names from this package, because the modules that define them may change.
"""

from __future__ import annotations

from aiocomms.errors import closed_by, gone
from aiocomms.lowlevel import clock
from aiocomms.lowlevel.auth import MAX_RECORD, check_exposed, mac, same
from aiocomms.lowlevel.cloexec import closed_on_exec
from aiocomms.lowlevel.control import ControlCodec
from aiocomms.lowlevel.copying import copy_message
from aiocomms.lowlevel.ending import at_end
from aiocomms.lowlevel.failures import Reason, disagreement, misfit
from aiocomms.lowlevel.forks import Unshared
from aiocomms.lowlevel.gate import Gate, same_user
from aiocomms.lowlevel.hosts import LOOPBACK, host_id, reachable_address
from aiocomms.lowlevel.libraries import load_libraries
from aiocomms.lowlevel.memory import has_room, in_use, register
from aiocomms.lowlevel.sockets import listen_at, tune
from aiocomms.lowlevel.stores import admitting, reach_store, serve_store, store_errors
from aiocomms.lowlevel.threads import call_in_thread, run_in_thread
from aiocomms.lowlevel.versions import HEAD_BYTES, Dialect
from aiocomms.lowlevel.waker import Inbox, Waker
from aiocomms.ops import buffers
from aiocomms.ops.modes import unaffected

__all__ = [
    "HEAD_BYTES",
    "LOOPBACK",
    "MAX_RECORD",
    "ControlCodec",
    "Dialect",
    "Gate",
    "Inbox",
    "Reason",
    "Unshared",
    "Waker",
    "admitting",
    "at_end",
    "buffers",
    "call_in_thread",
    "check_exposed",
    "clock",
    "closed_by",
    "closed_on_exec",
    "copy_message",
    "disagreement",
    "gone",
    "has_room",
    "host_id",
    "in_use",
    "listen_at",
    "load_libraries",
    "mac",
    "misfit",
    "reach_store",
    "reachable_address",
    "register",
    "run_in_thread",
    "same",
    "same_user",
    "serve_store",
    "store_errors",
    "tune",
    "unaffected",
]
