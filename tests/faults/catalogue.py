"""Every numbered case of the fault catalogue on every transport: the tests that make it, or why it does not apply.

A test is named as pytest does, without its parameters: those of a test that has the transport among them are told apart
by it. ``conformance::`` stands for the suite's package.
"""

from __future__ import annotations

from dataclasses import dataclass

TRANSPORTS = ("local", "c10d", "ucx")


@dataclass(frozen=True)
class Why:
    """Why a case, or a part of it, has no test on a transport."""

    reason: str


Named = tuple[str | Why, ...] | Why
"""Tests, and why there is none of some part of the case; or why there is none at all."""


@dataclass(frozen=True)
class Case:
    """One case: its tests on each transport, or why there are none."""

    number: int
    what: str
    local: Named
    c10d: Named
    ucx: Named

    def tests(self, transport: str) -> list[str]:
        return [it for it in self._of(transport) if isinstance(it, str)]

    def reasons(self, transport: str) -> list[str]:
        return [it.reason for it in self._of(transport) if isinstance(it, Why)]

    def _of(self, transport: str) -> tuple[str | Why, ...]:
        named: Named = getattr(self, transport)
        return (named,) if isinstance(named, Why) else named


ONE_PROCESS = Why("all ranks are in one process, which dies or stops as a whole")
NO_NETWORK = Why("there is no network")
NO_LISTENER = Why("nothing listens, and nothing of another process is read")


def but(reason: str) -> tuple[Why]:
    """Beside tests: of what there is none."""
    return (Why(reason),)


def tests(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{module}.py::{name}" for name in names)


def suite(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"conformance::{module}.py::{name}" for name in names)


def between_processes(number: int, what: str, *names: str | Why, ucx: tuple[str | Why, ...] = ()) -> Case:
    """A case of processes, whose tests run on both transports that have several."""
    return Case(number, what, ONE_PROCESS, names, names + ucx)


def everywhere(number: int, what: str, *names: str | Why, ucx: tuple[str | Why, ...] = ()) -> Case:
    """A case whose tests run on all transports."""
    return Case(number, what, names, names, names + ucx)


def deaths(*names: str) -> tuple[str, ...]:
    return tests("faults/test_deaths", *names)


def recovery(*names: str) -> tuple[str, ...]:
    return tests("faults/test_recovery", *names)


def life(*names: str) -> tuple[str, ...]:
    return tests("faults/test_lifecycle", *names)


def alone(*names: str) -> tuple[str, ...]:
    return tests("faults/test_one_process", *names)


H = "faults/test_hostile"
DEATHS = (
    between_processes(
        1,
        "SIGKILL amid a collective, small and 64 MiB",
        *deaths("test_amid_a_collective"),
        *tests("transports/test_processes", "test_a_rank_that_dies"),
        ucx=(
            *tests(
                "transports/ucx/test_ucx_deaths",
                "test_a_rank_that_dies_amid",
                "test_what_does_not_need_the_dead_rank_goes_on",
            ),
            *tests("transports/ucx/test_ucx_hosts", "test_a_rank_that_dies"),
        ),
    ),
    between_processes(2, "SIGKILL of a sender whose message waits", *deaths("test_a_sender_whose_message_waits")),
    between_processes(3, "SIGKILL of a sender amid a message of 64 MiB", *deaths("test_amid_a_message")),
    between_processes(4, "SIGKILL of a receiver amid a message of 64 MiB", *deaths("test_amid_a_message")),
    between_processes(
        5,
        "SIGKILL of the target of put, get, fetch_add, flush",
        *deaths("test_the_target_of_a_window"),
        *tests("transports/test_processes", "test_the_owner_of_a_window_dies"),
    ),
    between_processes(
        6,
        "two ranks at once, one of them the store's host",
        *deaths("test_two_at_once_and_the_host_of_the_store"),
        ucx=tests("transports/ucx/test_ucx_deaths", "test_two_die_at_once"),
    ),
    between_processes(7, "SIGTERM and a handler that closes", *deaths("test_sigterm_and_a_close")),
    between_processes(8, "sys.exit, os._exit, segfault, abort", *deaths("test_other_ends")),
    between_processes(
        9,
        "no memory for an object",
        *deaths("test_no_memory"),
        Why("who allocates says it in its own way, not always by a MemoryError; 2 s, with a message of 60 MiB"),
    ),
    between_processes(
        10, "death before the first op, or while it forms", *deaths("test_before_the_first_op", "test_while_it_forms")
    ),
    between_processes(
        11,
        "elastic restart of all workers",
        *recovery("test_torchrun_starts_all_anew", "test_a_store_that_a_crashed_run_has_used"),
        ucx=recovery("test_a_stopped_rank_is_out"),
    ),
)

WHO_IS_MISSING = suite("test_timeouts", "test_who_is_missing")
STALLS = (
    between_processes(
        12,
        "SIGSTOP amid a collective, then SIGCONT",
        *tests("faults/test_stalls", "test_stopped_past_a_deadline", "test_the_host_of_the_store_is_stopped"),
        ucx=recovery("test_a_stopped_rank_is_out"),  # by heartbeat, for which c10d does not ask
    ),
    between_processes(
        13, "SIGSTOP for less than the timeout", *tests("faults/test_stalls", "test_stopped_for_a_moment")
    ),
    Case(
        14,
        "a blocked event loop is no death, and is reported",
        tests("unit/progress/test_deadlines", "test_a_deadline_passes_while_the_loop_is_busy")
        + alone("test_a_slow_callback_is_reported"),
        recovery("test_a_blocked_loop_is_no_death")
        + tests("unit/diagnosis/test_recorder_processes", "test_a_busy_rank_does_not_answer"),
        recovery("test_a_blocked_loop_is_no_death", "test_a_long_call_that_holds_the_interpreter_is_no_death")
        + tests("transports/ucx/test_ucx", "test_a_rank_that_computes_does_not_hold_up_the_others")
        + tests("unit/diagnosis/test_recorder_processes", "test_a_busy_rank_does_not_answer"),
    ),
    between_processes(15, "8 processes on 2 busy cores", *recovery("test_a_starved_rank_is_no_death")),
    Case(
        16,
        "a rank that never calls is named",
        tests("unit/progress/test_deadlines", "test_the_message_says_who_was_missing") + WHO_IS_MISSING,
        tests("unit/diagnosis/test_recorder_processes", "test_the_error_says_who_was_missing_and_what_it_does")
        + WHO_IS_MISSING,
        tests("unit/diagnosis/test_recorder_processes", "test_the_error_says_who_was_missing_and_what_it_does")
        + WHO_IS_MISSING,
    ),
    Case(
        17,
        "a straggler after the others gave up",
        suite("test_timeouts", "test_a_late_collective_ends_the_communicator_everywhere"),
        life("test_a_straggler"),
        life("test_a_straggler"),
    ),
    *(
        Case(
            number,
            what,
            NO_NETWORK,
            tests("faults/test_network", *names),
            tests("faults/test_network", *names),
        )
        for number, what, names in (
            (
                18,
                "a link that is down for a while, or for good",
                ("test_a_link_that_comes_back", "test_a_link_that_is_lost"),
            ),
            (19, "one way is lost", ("test_one_way_is_lost",)),
            (
                20,
                "RST, half-close, dribble, a stall amid a message",
                ("test_a_connection_that_breaks", "test_a_dribble", "test_a_link_that_comes_back"),
            ),
            (21, "a link of 1 Mbit/s (16 in the quick form)", ("test_a_slow_link",)),
        )
    ),
    Case(
        22,
        "garbage at every listener",
        NO_LISTENER,
        tests(H, "test_strangers_at_every_listener", "test_strangers_at_every_listener_between_hosts")
        + but("what is dropped is not counted: torch's store and gloo do not say"),
        tests(
            H,
            "test_strangers_at_every_listener",
            "test_strangers_at_every_listener_between_hosts",
            "test_strangers_come_first",
        )
        + tests("transports/ucx/test_ucx_auth", "test_garbage_is_dropped"),
    ),
)

MISMATCHES = (
    everywhere(
        23,
        "another op",
        *suite("test_mismatch", "test_the_last_rank_does_something_else"),
        ucx=tests("transports/ucx/test_ucx_hosts", "test_ranks_that_disagree"),
    ),
    everywhere(24, "another shape", *suite("test_mismatch", "test_the_last_rank_does_something_else")),
    everywhere(
        25,
        "another dtype of the same size",
        *suite("test_mismatch", "test_the_last_rank_does_something_else", "test_a_message_of_another_dtype"),
    ),
    everywhere(
        26,
        "another reduce op or root",
        *suite("test_mismatch", "test_the_last_rank_does_something_else"),
        Why("groups are communicators, which do not meet; tags have one width; a device is each rank's own affair"),
    ),
    everywhere(27, "two collectives swapped", *suite("test_mismatch", "test_swapped_order")),
    everywhere(28, "a message of another size", *suite("test_messages", "test_a_message_of_another_size")),
    Case(
        29,
        "splits that disagree",
        suite("test_mismatch", "test_the_last_rank_does_something_else"),
        tests("transports/test_processes", "test_splits_that_disagree_are_told_to_all"),
        tests("transports/test_processes", "test_splits_that_disagree_are_told_to_all"),
    ),
    Case(
        30,
        "another version of the protocol",
        Why("one process has one version"),
        tests("faults/test_bootstrap", "test_ranks_of_two_versions", "test_ranks_of_two_byte_orders"),
        tests("faults/test_bootstrap", "test_ranks_of_two_versions", "test_ranks_of_two_byte_orders")
        + but("UCX_TLS may differ as long as there is a way between the ranks; that is UCX's to find out"),
    ),
)

STORE_DIES = tests("faults/test_bootstrap", "test_a_store_that_stops_and_dies")
# Before any transport is opened, so that these are of all of them.
STORE_GONE = tests(
    "unit/bootstrap/test_rendezvous",
    "test_a_store_whose_server_has_gone_is_lost",
    "test_a_store_whose_server_goes_while_ranks_meet_is_lost",
    "test_an_established_communicator_outlives_its_store",
)
STORE_STOPPED = tests(
    "unit/bootstrap/test_rendezvous",
    "test_a_store_whose_server_is_stopped_is_left_at_the_deadline",
    "test_an_attempt_that_was_given_up_does_not_hold_up_the_next",
)
RECORDS = tests("unit/lowlevel/test_auth", "test_a_forged_record_names_its_rank", "test_a_record_has_a_bound")
MEETING = tests(
    "unit/bootstrap/test_rendezvous",
    "test_one_error_lists_all_that_is_wrong_with_the_place",
    "test_of_two_processes_that_are_one_rank_the_later_one_is_it",
    "test_what_a_crashed_run_left_in_the_store_is_nobody",
    "test_one_name_many_times_on_one_store",
    "test_several_names_on_one_store",
)
STORES = (
    Case(
        31,
        "the store is killed before, during, after",
        STORE_GONE,
        STORE_GONE
        + STORE_DIES
        + tests("faults/test_bootstrap", "test_a_split_without_a_store")
        + recovery("test_a_transport_that_needs_the_store_says_so"),
        STORE_GONE
        + STORE_DIES
        + tests("faults/test_bootstrap", "test_a_split_without_a_store")
        + recovery("test_the_store_dies_too"),
    ),
    Case(
        32,
        "the store is stopped, and another attempt",
        STORE_STOPPED,
        STORE_STOPPED + STORE_DIES,
        STORE_STOPPED + STORE_DIES,
    ),
    Case(
        33,
        "a rank that comes late, or too late, and a new attempt",
        tests(
            "unit/bootstrap/test_rendezvous",
            "test_who_did_not_come_is_named",
            "test_what_a_crashed_run_left_in_the_store_is_nobody",
        ),
        tests("faults/test_bootstrap", "test_a_rank_that_is_late")
        + deaths("test_while_it_forms", "test_while_it_forms_and_one_is_late"),
        tests("faults/test_bootstrap", "test_a_rank_that_is_late")
        + deaths("test_while_it_forms")
        + tests("transports/ucx/test_ucx_auth", "test_who_does_not_come_is_named"),
    ),
    Case(
        34,
        "a rank twice, or that is none, stale keys, two jobs at one store",
        MEETING,
        MEETING
        + tests("faults/test_bootstrap", "test_a_rank_that_is_there_twice")
        + recovery("test_a_store_that_a_crashed_run_has_used"),
        MEETING
        + tests("faults/test_bootstrap", "test_a_rank_that_is_there_twice")
        + recovery("test_a_store_that_a_crashed_run_has_used"),
    ),
    everywhere(
        35,
        "a port in use, a name that does not resolve, IPv6, nobody there",
        *tests(
            "unit/bootstrap/test_stores",
            "test_a_port_in_use_is_refused_at_once",
            "test_a_name_that_does_not_resolve",
            "test_rank_0_listens_on_the_given_address_only",
            "test_nobody_listens",
            "test_the_master_says_nothing",
        ),
    ),
    Case(
        36,
        "values of the store that are wrong",
        RECORDS,
        RECORDS + tests(H, "test_a_stranger_in_the_store", "test_gloo_does_not_believe_the_store"),
        RECORDS + tests(H, "test_a_stranger_in_the_store"),
    ),
)

FIRST_REASON = suite("test_timeouts", "test_the_first_reason_stays")
C = "test_cancellation"
CANCELLATIONS = (
    everywhere(
        37,
        "cancel a receive that nothing matched",
        *suite(C, "test_withdrawn_receive_did_not_happen", "test_cancelling_the_only_await_withdraws_a_receive"),
    ),
    Case(
        38,
        "cancel a receive amid its transfer, and forget the tensor",
        tests(
            "unit/progress/test_work",
            "test_a_work_that_nobody_keeps_is_done_all_the_same_and_keeps_its_tensors_until_then",
        ),
        suite(C, "test_cancel_races_with_the_message")
        + but("a race, and its tensor is kept: none is forgotten amid the transfer, none's memory given to others"),
        tests("transports/ucx/test_ucx", "test_a_receive_that_is_cancelled_and_forgotten"),
    ),
    Case(
        39,
        "cancel a send, and forget the tensor",
        suite(C, "test_a_send_is_not_withdrawn"),
        suite(C, "test_a_send_is_not_withdrawn"),
        tests("transports/ucx/test_ucx", "test_a_send_that_is_cancelled_and_forgotten")
        + suite(C, "test_a_send_is_not_withdrawn"),
    ),
    everywhere(40, "cancel a collective on one rank", *suite(C, "test_a_collective_is_not_withdrawn")),
    everywhere(
        41,
        "cancel on all ranks, again and again",
        *suite(C, "test_cancelled_again_and_again", "test_cancelled_at_random_on_all_ranks"),
        Why("a hundred thousand cancellations are the soak's"),
    ),
    everywhere(
        42,
        "time that runs out, in each way",
        *suite(
            C,
            "test_time_that_runs_out_withdraws_a_receive",
            "test_asyncio_timeout_withdraws_a_receive",
            "test_cancelled_when_it_has_just_happened",
        ),
    ),
    everywhere(
        43,
        "cancel twice, amid a close, beside another awaiter",
        *suite(C, "test_one_of_two_awaits_is_cancelled", "test_withdrawn_receive_did_not_happen"),
        *suite("test_closing", "test_a_cancelled_close_releases_everything"),
    ),
    everywhere(44, "a sibling in a task group fails", *suite(C, "test_a_sibling_that_fails_cancels_a_receive")),
    everywhere(
        45,
        "close in a cancelled scope",
        *suite("test_closing", "test_a_close_in_a_cancelled_scope_releases_everything"),
    ),
    Case(
        46, "Ctrl-C during an await", alone("test_an_interrupt"), life("test_an_interrupt"), life("test_an_interrupt")
    ),
    everywhere(
        47,
        "the deadline of an op",
        *suite("test_timeouts", "test_a_late_collective_ends_the_communicator_everywhere"),
        *suite("test_closing", "test_a_buffer_is_left_alone_after_an_abort"),
    ),
    Case(
        48,
        "abort with 1000 ops pending, from anywhere; abort against deadline",
        tests(
            "unit/test_communicator",
            "test_abort_ends_everything_everywhere",
            "test_abort_from_another_thread",
            "test_abort_from_a_signal_handler",
        )
        + FIRST_REASON,
        life("test_an_abort_of_a_thousand") + suite("test_closing", "test_abort_from_another_thread") + FIRST_REASON,
        life("test_an_abort_of_a_thousand") + suite("test_closing", "test_abort_from_another_thread") + FIRST_REASON,
    ),
)

CALLBACKS = suite(
    "test_work",
    "test_a_callback_may_start_operations",
    "test_a_callback_that_raises",
    "test_a_callback_may_close",
)
FREE_THREADED = but("a build of Python without the lock was not tried; its engine does not ask for one")
# Of the core, whatever the transport is.
FULL_DISK = tests("unit/diagnosis/test_recorder", "test_what_cannot_be_written_is_said_once_and_harms_nothing")
NO_WATCHDOG = tests(
    "unit/progress/test_deadlines",
    "test_without_a_thread_the_communicator_is_lost_at_once",
    "test_without_a_thread_nothing_opens_but_a_world_of_one",
)
NO_VERSIONS = but("debug mode compares ops with each other; it reads no version counters, and sees no program's write")
W = "test_work"
LIFE = (
    Case(
        49,
        "a storage that is resized, a tensor that is set",
        tests(
            "unit/progress/test_work",
            "test_a_work_that_nobody_keeps_is_done_all_the_same_and_keeps_its_tensors_until_then",
            "test_a_storage_that_is_resized_during_an_op_is_an_error",
            "test_memory_stays_until_an_op_is_done_whatever_its_tensor_is_given",
        )
        + NO_VERSIONS,
        life("test_a_storage_that_is_resized", "test_a_tensor_that_is_set") + NO_VERSIONS,
        life("test_a_tensor_that_is_set")
        + but("the memory of a resized storage is freed, and the engine writes into it: see what is known to fail")
        + NO_VERSIONS,
    ),
    everywhere(
        50,
        "a work that nobody awaits",
        *suite("test_collectives", "test_a_work_that_nobody_awaits_completes"),
        *suite(W, "test_a_failure_that_nobody_asks_for_is_reported_once"),
        *tests("unit/progress/test_work", "test_a_failure_that_nobody_asks_for_is_reported_once"),
    ),
    everywhere(
        51,
        "a work that is awaited often, or late",
        *suite(W, "test_pending_then_done", "test_many_awaiters", "test_awaited_after_the_close"),
    ),
    everywhere(
        52,
        "another loop, another thread",
        *suite(W, "test_waiting_on_another_thread", "test_operations_belong_to_the_loops_thread"),
        *tests("unit/progress/test_work", "test_awaiting_in_another_loop_is_an_error"),
    ),
    Case(
        53,
        "a loop that ends with works pending",
        tests("unit/progress/test_driver", "test_a_loop_that_ends_with_works_pending_ends"),
        life("test_loops_end_with_works_pending"),
        life("test_loops_end_with_works_pending"),
    ),
    Case(
        54,
        "loop after loop in one process",
        tests("unit/progress/test_driver", "test_fifty_loops_one_after_the_other"),
        life("test_loops_come_and_go"),
        life("test_loops_come_and_go"),
    ),
    everywhere(
        55,
        "close twice, at once, on one rank, by an exception",
        *suite(
            "test_closing",
            "test_a_closed_communicator_says_so",
            "test_several_tasks_close_it",
            "test_close_lets_what_is_under_way_end",
            "test_who_needs_a_rank_that_closed_is_told",
            "test_an_error_in_the_context_aborts",
        ),
        Why("a close is awaited, so no __del__ can do it"),
    ),
    Case(
        56,
        "an interpreter that ends without a close",
        tests("unit/progress/test_driver", "test_a_loop_that_ends_with_works_pending_ends")
        + tests("unit/diagnosis/test_leak_guard", "test_what_is_open_when_its_loop_ends_is_closed"),
        life("test_an_interpreters_end") + tests("transports/test_processes", "test_an_end_without_a_close"),
        life("test_an_interpreters_end") + tests("transports/test_processes", "test_an_end_without_a_close"),
    ),
    Case(
        57,
        "fork",
        tests("unit/progress/test_driver", "test_a_forked_child_is_refused_and_does_its_parent_no_harm"),
        tests("transports/test_processes", "test_a_forked_child"),
        tests("transports/test_processes", "test_a_forked_child"),
    ),
    Case(
        58,
        "exec",
        Why("it holds no descriptor but the loop's waker, which Python opens close-on-exec"),
        life("test_a_child_inherits_nothing", "test_nothing_is_inheritable"),
        life("test_a_child_inherits_nothing", "test_nothing_is_inheritable"),
    ),
    Case(
        59,
        "no descriptors, no shared memory, no threads, a full disk",
        FULL_DISK + NO_WATCHDOG + alone("test_no_descriptors"),
        FULL_DISK
        + NO_WATCHDOG
        + life("test_no_descriptors", "test_no_threads", "test_no_thread_of_its_own")
        + life("test_no_thread_for_a_large_collective"),
        FULL_DISK
        + NO_WATCHDOG
        + life("test_no_descriptors", "test_no_shared_memory", "test_no_threads", "test_no_thread_of_its_own"),
    ),
    Case(
        60,
        "created and closed again and again",
        tests("unit/test_communicator", "test_many_communicators_leave_nothing_behind")
        + but("600 worlds of one: threads and descriptors; memory is not measured, and nothing is split"),
        tests("transports/test_processes", "test_nothing_is_left")
        + suite("test_closing", "test_opened_and_closed_again_and_again")
        + but("some ten times, threads and descriptors; memory is not measured, and nothing is split"),
        tests("transports/ucx/test_ucx_leaks", "test_nothing_is_left")
        + but("200 times and 300 splits; of memory, less than 16 KiB each time"),
    ),
    everywhere(61, "a clock that is set", *life("test_no_clock_that_can_be_set", "test_a_clock_that_jumps")),
    Case(
        62,
        "a storm of collections; a subinterpreter",
        alone("test_a_storm_of_collections") + life("test_a_subinterpreter") + FREE_THREADED,
        life("test_a_storm_of_collections", "test_a_subinterpreter") + FREE_THREADED,
        life("test_a_storm_of_collections", "test_a_subinterpreter") + FREE_THREADED,
    ),
    Case(
        63,
        "callbacks that start ops, raise, close",
        CALLBACKS,
        CALLBACKS + life("test_callbacks"),
        CALLBACKS + life("test_callbacks"),
    ),
)

DESCRIPTIONS = tests(
    "unit/ops/test_codec",
    "test_descriptions_that_make_no_sense_are_refused",
    "test_a_length_from_the_wire_allocates_nothing",
)
WINDOWS = suite("test_windows", "test_wrong_arguments", "test_close_comes_after_everybodys_operations")
# Files of each rank, whatever the transport is.
OWN_FILES = tests(H, "test_another_user_cannot_read_the_token") + tests(
    "unit/diagnosis/test_recorder",
    "test_a_file_is_its_owners_alone_and_replaces_nothing",
    "test_a_link_in_its_place_is_not_followed",
)
TEN_MILLION = but("ten million frames are a matter of hours: AIOCOMMS_FUZZ says how many")
HOSTILE = (
    Case(
        64,
        "strangers, ten thousand, silent, with old words",
        NO_LISTENER,
        tests(H, "test_strangers_at_every_listener", "test_a_rank_of_another_job")
        + but("all that listens is torch's store: how many it lets stay, and how long, is torch's"),
        tests(H, "test_strangers_at_every_listener", "test_strangers_come_first", "test_a_rank_of_another_job")
        + tests(
            "transports/ucx/test_ucx_auth",
            "test_ten_thousand_strangers",
            "test_a_wrong_key_opens_nothing",
            "test_an_old_handshake_opens_nothing",
            "test_who_says_nothing_is_dropped_in_time",
        ),
    ),
    Case(
        65,
        "header bombs",
        tests("unit/families/test_objects", "test_a_header_that_makes_no_sense_is_refused")
        + DESCRIPTIONS
        + but("of objects and streams, no others have headers; memory is measured of the decoder, not of the process"),
        tests(H, "test_header_bombs")
        + DESCRIPTIONS
        + but("a process may grow by 8 MiB meanwhile, for it goes on working; the decoder alone by less than 1 MiB"),
        tests(H, "test_control_frames_that_make_no_sense")
        + DESCRIPTIONS
        + tests("faults/test_fuzz", "test_mutations")
        + tests("transports/ucx/test_ucx_engine", "test_engines_of_one_process")
        + but("memory is measured of the decoder, not of the process"),
    ),
    Case(
        66,
        "a pickle by every channel",
        tests(H, "test_a_pickle_on_local"),
        tests(H, "test_a_pickle_by_every_channel"),
        tests(H, "test_a_pickle_by_every_channel"),
    ),
    Case(
        67,
        "objects beyond each limit",
        tests("unit/ops/test_codec", "test_what_is_too_much_is_refused", "test_nesting_bombs_are_refused")
        + tests(H, "test_objects_beyond_each_limit_on_local"),
        tests(H, "test_objects_beyond_each_limit"),
        tests(H, "test_objects_beyond_each_limit"),
    ),
    Case(
        68,
        "mutated bytes into every parser",
        tests("unit/ops/test_codec", "test_mutated_objects_give_an_object_or_a_protocol_error") + TEN_MILLION,
        tests("faults/test_fuzz", "test_mutations", "test_any_bytes") + TEN_MILLION,
        tests("faults/test_fuzz", "test_mutations", "test_any_bytes")
        + tests("transports/ucx/test_ucx_engine", "test_engines_of_one_process")
        + TEN_MILLION,
    ),
    Case(
        69,
        "another user of the machine",
        OWN_FILES,
        OWN_FILES + tests(H, "test_another_user_opens_nothing"),
        OWN_FILES
        + tests(H, "test_another_user_opens_nothing", "test_memory_that_is_not_a_ranks_own")
        + tests("transports/ucx/test_ucx_auth", "test_another_user_is_not_heard")
        + but("shared memory has no path, so no link can be there first"),
    ),
    Case(
        70,
        "a window that is gone, or ends earlier",
        WINDOWS,
        WINDOWS + tests(H, "test_a_request_beyond_a_window", "test_requests_beyond_a_window"),
        WINDOWS + tests(H, "test_windows_are_bounded_in_the_engine"),
    ),
)

CASES = (*DEATHS, *STALLS, *MISMATCHES, *STORES, *CANCELLATIONS, *LIFE, *HOSTILE)
