"""Portals: objects through which threads other than the event loop's thread call a communicator's operations.

The calling thread creates an object that describes the op, and checks the object. The thread starts the op itself if
native code can do this. Otherwise the thread puts the op into a queue (module ``door``). The loop starts the queued ops
in order. One iteration of the loop may start many ops. Each op runs with the context variables of the thread that has
called the op. Any number of threads can wait for an op. When the op ends, the loop's thread wakes each waiting thread
by a *bell*, which is a lock or a callback (module ``works``).

A loop that has ended or is blocked wakes no thread. So each waiting thread checks the loop every
:data:`~aiocomms.communicator.portal.pending.LOOK` seconds. If the loop cannot complete the op, the waiting thread
completes the op with an error.
"""
