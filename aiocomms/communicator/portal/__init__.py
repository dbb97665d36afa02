"""Portals: a communicator's operations for threads without its event loop, each with a work for which a thread waits.

A thread makes the record of an op, checks it, and puts it into a queue (``door``). The loop starts the queued ops in
order, many in one turn, each in the context of the thread that called it. When an op ends, the loop's thread rings a
bell of each thread that waits for it (``works``).

No bell rings if the loop has ended or is blocked. So each waiting thread checks every
:data:`~aiocomms.communicator.portal.pending.LOOK` seconds, and ends a work that the loop cannot end.
"""
