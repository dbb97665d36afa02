"""Portals: a communicator's operations for all threads except the event loop's thread. A thread can wait for each op.

The calling thread creates an object that describes the op, checks it, and puts it into a queue (``door``). The loop
starts the queued ops in order. One iteration of the loop may start many ops. Each op runs in the context variables of
the calling thread. When an op ends, the loop's thread wakes each waiting thread by a *bell*, which is a lock or a
callback (``works``).

A loop that has ended or is blocked wakes no thread. So each waiting thread checks the loop every
:data:`~aiocomms.communicator.portal.pending.LOOK` seconds, and ends a work that the loop cannot end.
"""
