"""Portals: objects through which threads other than the event loop's thread call a communicator's operations.

The calling thread creates an object that describes the op, checks the object, and puts it into a queue (module
``door``). The loop starts the queued ops in order. One iteration of the loop may start many ops. Each op runs in the
context variables of the calling thread. Any number of threads can wait for an op. When the op ends, the loop's thread
wakes each waiting thread by a *bell*, which is a lock or a callback (module ``works``).

A loop that has ended or is blocked wakes no thread. So each waiting thread checks the loop every
:data:`~aiocomms.communicator.portal.pending.LOOK` seconds. If the loop cannot complete the op, the waiting thread
completes the op with an error.
"""
