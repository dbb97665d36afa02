"""The fault catalogue: every numbered case, and the reason where a transport has no test of it or of a part of it.

A mark names the cases that a test shows: ``@pytest.mark.fault(12)``, or ``@pytest.mark.fault(3, 4)`` for two. The test
shows them on the transport among its parameters. Without such a parameter it shows them on all transports, or on the
one that the mark names: ``transport="ucx"``.
"""

from __future__ import annotations

from dataclasses import dataclass

TRANSPORTS = ("local", "c10d", "ucx")

ONE_PROCESS = "all ranks are in one process, which dies or stops as a whole"
NO_NETWORK = "there is no network"
NO_LISTENER = "nothing listens, and nothing of another process is read"
NO_VERSIONS = "debug mode compares ops with each other; it reads no version counters, and sees no program's write"
OF_UCX = "it uses neither UCX nor shared memory of the host"
ABOVE_TRANSPORTS = "streams are above transports: shown over `local`"
NO_ENDPOINTS = "it meets in a store, and endpoints have none"
SKIPPED = f"{NO_ENDPOINTS}: its tests are skipped"
NO_GPU = "it carries no memory of a GPU"
IN_PROCESSES = "a group of `torch.distributed` has a process for each rank"
OF_THE_DECODER = "memory is measured of the decoder, not of the process"


@dataclass(frozen=True)
class Case:
    """One case, and the reasons why a transport has no test of it, or of a part of it."""

    number: int
    what: str
    local: str = ""
    c10d: str = ""
    ucx: str = ""
    but: str | dict[str, str] = ""
    """The part that has no test, and why: one text for each transport, or one for all."""

    def untested(self, transport: str) -> str:
        """Return why a transport has no test, or an empty text if it has some."""
        reason: str = getattr(self, transport)
        return reason

    def gap(self, transport: str) -> str:
        """Return the part that has no test on a transport, or an empty text if there is no such part."""
        if self.untested(transport):
            return ""
        return self.but if isinstance(self.but, str) else self.but.get(transport, "")


CASES = (
    # A process dies.
    Case(1, "SIGKILL amid a collective, small and 64 MiB", local=ONE_PROCESS),
    Case(2, "SIGKILL of a sender whose message waits", local=ONE_PROCESS),
    Case(3, "SIGKILL of a sender amid a message of 64 MiB", local=ONE_PROCESS),
    Case(4, "SIGKILL of a receiver amid a message of 64 MiB", local=ONE_PROCESS),
    Case(5, "SIGKILL of the target of put, get, fetch_add, flush", local=ONE_PROCESS),
    Case(6, "two ranks at once, one of them the store's host", local=ONE_PROCESS),
    Case(7, "SIGTERM and a handler that closes", local=ONE_PROCESS),
    Case(8, "sys.exit, os._exit, segfault, abort", local=ONE_PROCESS),
    Case(
        9,
        "no memory for an object",
        local=ONE_PROCESS,
        but="who allocates says it in its own way, not always by a MemoryError; 2 s, with a message of 60 MiB",
    ),
    Case(10, "death before the first op, or while it forms", local=ONE_PROCESS),
    Case(11, "elastic restart of all workers", local=ONE_PROCESS),
    # A process is stopped, or the network fails.
    Case(12, "SIGSTOP amid a collective, then SIGCONT", local=ONE_PROCESS),
    Case(13, "SIGSTOP for less than the timeout", local=ONE_PROCESS),
    Case(14, "a blocked event loop is no death, and is reported"),
    Case(15, "8 processes on 2 busy cores", local=ONE_PROCESS),
    Case(16, "a rank that never calls is named"),
    Case(17, "a straggler after the others gave up"),
    Case(18, "a link that is down for a while, or for good", local=NO_NETWORK),
    Case(19, "one way is lost", local=NO_NETWORK),
    Case(20, "RST, half-close, dribble, a stall amid a message", local=NO_NETWORK),
    Case(21, "a link of 1 Mbit/s (16 in the quick form)", local=NO_NETWORK),
    Case(
        22,
        "garbage at every listener",
        local=NO_LISTENER,
        but={"c10d": "what is dropped is not counted: gloo does not say"},
    ),
    # Ranks disagree.
    Case(23, "another op"),
    Case(24, "another shape"),
    Case(25, "another dtype of the same size"),
    Case(
        26,
        "another reduce op or root",
        but="groups are communicators, which do not meet; tags have one width; a device is each rank's own affair",
    ),
    Case(27, "two collectives swapped"),
    Case(28, "a message of another size"),
    Case(29, "splits that disagree"),
    Case(
        30,
        "another version of the protocol",
        local="one process has one version",
        but={"ucx": "UCX_TLS may differ as long as there is a way between the ranks; that is UCX's to find out"},
    ),
    # The store fails.
    Case(31, "the store is killed before, during, after"),
    Case(32, "the store is stopped, and another attempt"),
    Case(33, "a rank that comes late, or too late, and a new attempt"),
    Case(34, "a rank twice, or that is none, stale keys, two jobs at one store"),
    Case(35, "a port in use, a name that does not resolve, IPv6, nobody there"),
    Case(36, "values of the store that are wrong"),
    # An op is cancelled, or its deadline passes.
    Case(37, "cancel a receive that nothing matched"),
    Case(
        38,
        "cancel a receive amid its transfer, and forget the tensor",
        but={
            "c10d": "a race, and its tensor is kept: none is forgotten amid the transfer, none's memory given to others"
        },
    ),
    Case(39, "cancel a send, and forget the tensor"),
    Case(40, "cancel a collective on one rank"),
    Case(41, "cancel on all ranks, again and again", but="a hundred thousand cancellations are the soak's"),
    Case(42, "time that runs out, in each way"),
    Case(43, "cancel twice, amid a close, beside another awaiter"),
    Case(44, "a sibling in a task group fails"),
    Case(45, "close in a cancelled scope"),
    Case(46, "Ctrl-C during an await"),
    Case(47, "the deadline of an op"),
    Case(48, "abort with 1000 ops pending, from anywhere; abort against deadline"),
    # Loops, threads, interpreters, and what a process runs out of.
    Case(
        49,
        "a storage that is resized, a tensor that is set",
        but=NO_VERSIONS,
    ),
    Case(50, "a work that nobody awaits"),
    Case(51, "a work that is awaited often, or late"),
    Case(52, "another loop, another thread"),
    Case(53, "a loop that ends with works pending"),
    Case(54, "loop after loop in one process"),
    Case(55, "close twice, at once, on one rank, by an exception", but="a close is awaited, so no __del__ can do it"),
    Case(56, "an interpreter that ends without a close"),
    Case(57, "fork"),
    Case(58, "exec", local="it holds no descriptor but the loop's waker, which Python opens close-on-exec"),
    Case(59, "no descriptors, no shared memory, no threads, a full disk"),
    Case(
        60,
        "created and closed again and again",
        but={
            "local": "600 worlds of one: threads and descriptors; memory is not measured, and nothing is split",
            "c10d": "some ten times, threads and descriptors; memory is not measured, and nothing is split",
            "ucx": "200 times and 300 splits; of memory, less than 16 KiB each time",
        },
    ),
    Case(61, "a clock that is set"),
    Case(
        62,
        "a storm of collections; a subinterpreter",
        but="a build of Python without the lock was not tried; its engine does not ask for one",
    ),
    Case(63, "callbacks that start ops, raise, close"),
    # Somebody is hostile.
    Case(
        64,
        "strangers, ten thousand, silent, with old words",
        local=NO_LISTENER,
        but={"c10d": "while it forms gloo listens, too: how many it lets stay, and how long, is gloo's"},
    ),
    Case(
        65,
        "header bombs",
        but={
            "local": "of objects and streams, no others have headers; " + OF_THE_DECODER,
            "c10d": "a process may grow by 8 MiB meanwhile, for it goes on working; the decoder by less than 1 MiB",
            "ucx": OF_THE_DECODER,
        },
    ),
    Case(66, "a pickle by every channel"),
    Case(67, "objects beyond each limit"),
    Case(
        68,
        "mutated bytes into every parser",
        but="ten million frames are a matter of hours: AIOCOMMS_FUZZ says how many",
    ),
    Case(69, "another user of the machine", but={"ucx": "shared memory has no path, so no link can be there first"}),
    Case(70, "a window that is gone, or ends earlier"),
    # A communicator ends.
    Case(71, "a finalizer on the thread of the deadlines"),
    Case(72, "a transport raises where it must not"),
    Case(73, "a transport raises amid a step of several messages"),
    Case(74, "an abort, a death and a deadline while it closes", but={"local": "no death: " + ONE_PROCESS}),
    Case(75, "the flight recorder's folder hangs"),
    Case(76, "a window over memory that another communicator of the process uses"),
    Case(
        77,
        "memory that its program moves while an op has it",
        but={"c10d": "gloo amid a transfer may use memory that was freed: see what is known to fail"},
    ),
    Case(78, "a receive whose awaiter never ran"),
    Case(79, "a rank forks, and dies before its child", local=ONE_PROCESS),
    Case(
        80, "a child with a communicator of its own ends", local="it has no threads, connections or engine to inherit"
    ),
    Case(81, "a program's exit handler, whenever it was registered", local=ONE_PROCESS),
    Case(82, "a store that nobody needs any more is let go", local="its ranks meet in no store of a launcher's"),
    Case(
        83,
        "an engine that outlives the interpreter",
        local="it has no engine, and no thread of its own",
        but={"c10d": "amid a collective gloo may end the process: see what is known to fail"},
    ),
    Case(84, "a transport's import changes no signal"),
    Case(85, "the recorder's signal before the first communicator"),
    Case(
        86,
        "more than 2^32 messages to one rank, a copy that fails, an answer of a rank that was not asked",
        local=NO_NETWORK,
        c10d="gloo numbers and matches its messages itself",
    ),
    Case(
        87,
        "more ranks on one host than a slot of shared memory has room for, and no memory for a step of an op",
        local="ranks share Python's objects, and whoever has no memory for one gets a MemoryError",
        c10d="gloo allocates inside torch, which raises to whoever waits",
        but="of the ranks the check alone is tested: no such world is started",
    ),
    Case(
        88,
        "shared memory that is full, UCX_TLS that differs, a process that is not dumpable",
        local=OF_UCX,
        c10d=OF_UCX,
        but="of more than 16 ranks those prove themselves whose distance is a power of two; ranks on GPUs do not yet",
    ),
    Case(89, "UCX's variables, and limits of the process", local=OF_UCX, c10d=OF_UCX),
    Case(91, "a timeout on every rank that waited"),
    Case(92, "an incomplete environment of a launcher; a world of one that is not meant"),
    Case(93, "mpiexec on one host without MASTER_PORT"),
    Case(94, "a stranger fills the store, and forges arrivals", local=NO_LISTENER),
    Case(
        99,
        "a large object blocks the loop",
        but="it is encoded within the call, since its program may change it; shown is how often it is copied",
    ),
    Case(100, "an error of new_window that was caught"),
    Case(101, "a stranger takes the descriptors of the store's host", local=NO_LISTENER),
    Case(
        102,
        "a lowered collective, a stream, a window, a split, forming that fails on one rank",
        but={"c10d": "a window is made of messages, and its opening cannot fail"},
    ),
    Case(
        103,
        "a flood of connections while it forms",
        local=NO_LISTENER,
        c10d="gloo's listeners have no gate: a flood may keep its ranks apart, until they time out",
    ),
    Case(
        104,
        "a stream.send that is cancelled, and its tensor",
        but={"c10d": ABOVE_TRANSPORTS, "ucx": ABOVE_TRANSPORTS},
    ),
    Case(105, "another version, whose records have another shape"),
    Case(
        106,
        "how long an outage may take",
        local=NO_NETWORK,
        but="2 s are survived, without a heartbeat; the times with one were tried by hand, and stand in the notes",
    ),
    Case(
        107,
        "a cable that loses, delays, reorders, repeats, is slow, is cut for 2 s, or takes smaller frames",
        local=NO_NETWORK,
    ),
    # Endpoints.
    Case(108, "a region that was revoked", but={"c10d": SKIPPED}),
    Case(109, "a right that a descriptor does not give; bounds", but={"c10d": SKIPPED}),
    Case(
        110,
        "a descriptor that is forged, foreign, expired; an end that lies; another token",
        but={"c10d": SKIPPED},
    ),
    Case(
        111,
        "an endpoint that does not answer",
        but={"local": "ranks of one loop cannot be late for each other: its tests are skipped", "c10d": SKIPPED},
    ),
    Case(112, "a peer dies, and no other connection notices; it comes again", local=ONE_PROCESS, c10d=NO_ENDPOINTS),
    Case(
        113,
        "cancelled puts, and their tensors",
        local="a put is done within its call",
        c10d=NO_ENDPOINTS,
    ),
    # Torch's own machinery.
    Case(
        114,
        "torch's other forms of a group's methods: a tensor for a list, `op`, `root`, `timeout`",
        but={"local": IN_PROCESSES},
    ),
    # A program changes torch's state while ops run.
    Case(115, "a default device that is not the communicator's"),
    Case(116, "FakeTensorMode, inference mode and other modes; tensors that stand for others"),
    Case(117, "a write into what autograd has saved; a tangent of forward-mode AD"),
    Case(118, "a GPU's stream that is current when an op is called, and not when its messages come", NO_GPU, NO_GPU),
    Case(119, "an op of messages within a CUDA graph's capture", NO_GPU, NO_GPU),
    # A service fails, and errors and metrics name the cause.
    Case(120, "a plan, or recover, that raises what is no Exception"),
    Case(121, "workers whose driver is lost"),
    Case(
        122,
        "SIGTERM to a worker alone; a rank that fails before the meeting",
        but="the signal is logged, and the rank is not replaced; who serves the store and fails is not heard of",
    ),
    Case(123, "streams and a service at rest, and who waits for a message of one"),
    Case(124, "who was late, in a field, on all ranks alike"),
    Case(
        125,
        "the number of a collective, an endpoint's errors, an array's advice, a path that is not there",
        but={"c10d": NO_ENDPOINTS},
    ),
    Case(
        126,
        "the root cause that torchrun names",
        but={"local": "its ranks are one process: shown is what the hook writes"},
    ),
    Case(127, "metrics of the failure that a recovery follows, and their labels"),
    # Programs do unusual things with tensors, handles and numbers.
    Case(128, "a copy or a pickle of a communicator, or of what else stands for something of one process"),
    Case(129, "a pickle of a slice, or of what is larger than an object may be"),
    Case(130, "a rank, tag or size that is NumPy's, an IntEnum's, or a number by `__index__` alone"),
    Case(
        131,
        "operations in a function that torch.compile compiles",
        but={"c10d": "what is traced is above transports, but for native methods: shown over `local` and `ucx`"},
    ),
    Case(132, "share_memory_() while a receive is pending"),
    Case(133, "a hook that raises what is no Exception"),
    Case(134, "what listens at torch's dispatcher: modes, and tensors that decide themselves"),
    Case(135, "an all-gather into a tensor as torch's inductor calls it"),
    Case(136, "groups of some ranks, which share an engine and a thread, and are formed by these ranks alone"),
    Case(137, "a group of several backends, for the CPU and for a GPU"),
    Case(138, "a store that the program drops while a communicator is open", local="no process serves it a store"),
    Case(139, "the conformance suite where a warning is an error, and there is no project"),
    Case(140, "what MPI's users look for: unsigned integers of more than 8 bits in reductions; scan, exscan"),
)
