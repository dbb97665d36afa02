"""A communicator on other threads than its loop's: the same operations, each with a work that a thread waits for.

A thread makes the record of an op, checks it, and puts it into a queue (``door``); the loop starts what is there, in
that order and many in one turn, each in the context of the thread that has called it. When an op ends, the loop's
thread rings a bell of each thread that waits for it (``works``).

No bell rings where the loop has ended or stands still. So each waiting thread looks for itself every
:data:`~aiocomms.communicator.portal.pending.LOOK` seconds, and ends what has no other end.
"""
