from collections.abc import Sequence
import enum

import torch


class UcxError(RuntimeError):
    pass

def explain(error: int) -> str: ...

def is_plain(tensor: object, written: bool, /) -> bool: ...

class Status(enum.IntEnum):
    DONE = 0

    TRUNCATED = 1

    OTHER_DTYPE = 2

    CLOSED = 3

    UNEQUAL = 4

    BROKEN = 5

    DROPPED = 6

class NoticeKind(enum.IntEnum):
    FRAME = 0

    LOST = 1

    LEFT = 2

    DISAGREES = 3

    MISLED = 4

    FAILED = 5

class Operator(enum.IntEnum):
    SUM = 0

    PRODUCT = 1

    MIN = 2

    MAX = 3

    BAND = 4

    BOR = 5

    BXOR = 6

    AVG = 7

    PREMUL_SUM = 8

def dtype_names() -> tuple[str, ...]: ...

def create_segment(ranks: int) -> int: ...

class Engine:
    def __init__(self, rank: int, size: int, options: Sequence[tuple[str, str]], device: int = -1) -> None: ...

    def address(self) -> bytes: ...

    def start(self, addresses: Sequence[bytes], sockets: Sequence[int], pids: Sequence[int], crowded: bool, cookies: Sequence[tuple[int, int]]) -> None: ...

    def fileno(self) -> int: ...

    @property
    def ready(self) -> bool: ...

    @property
    def bulk(self) -> bool: ...

    def progress(self) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int, bytes]]] | None: ...

    def close(self, sound: bool, patience: float) -> None: ...

    def halt(self) -> None: ...

    def send_frame(self, peer: int, frame: bytes) -> bool: ...

    def add_group(self, rank: int, peers: Sequence[int]) -> int: ...

    def open_group(self, group: int, their_ids: Sequence[int], segment: int, hosts: Sequence[int], readable: bool) -> None: ...

    def reads_all(self, peers: Sequence[int]) -> bool: ...

    def lose_group(self, group: int) -> None: ...

    def close_group(self, group: int) -> None: ...

    def signs(self) -> list[int]: ...

    def has_let_go(self, group: int, rank: int) -> bool: ...

    def missing(self, group: int) -> list[int]: ...

    def send(self, ticket: int, group: int, tensor: torch.Tensor, dst: int, channel: int, tag: int, /) -> bool: ...

    def recv(self, ticket: int, group: int, tensor: torch.Tensor, src: int, channel: int, tag: int, /) -> bool: ...

    def cancel(self, group: int, src: int, channel: int, tag: int, ticket: int, /) -> bool: ...

    def head(self, ticket: int) -> bytes: ...

    def barrier(self, ticket: int, group: int, form: int, detail: int, /) -> float: ...

    def broadcast(self, ticket: int, group: int, form: int, tensor: torch.Tensor, root: int, /) -> float: ...

    def all_reduce(self, ticket: int, group: int, form: int, tensor: torch.Tensor, op: int, factor: float, /) -> float: ...

    def reduce(self, ticket: int, group: int, form: int, tensor: torch.Tensor, op: int, factor: float, root: int, /) -> float: ...

    def reduce_scatter(self, ticket: int, group: int, form: int, size: int, inputs: torch.Tensor | Sequence[torch.Tensor], output: torch.Tensor, op: int, factor: float, /) -> float: ...

    def all_gather(self, ticket: int, group: int, form: int, size: int, input: torch.Tensor, outputs: torch.Tensor | Sequence[torch.Tensor], /) -> float: ...

    def gather(self, ticket: int, group: int, form: int, input: torch.Tensor, outputs: Sequence[torch.Tensor], root: int, /) -> float: ...

    def scatter(self, ticket: int, group: int, form: int, inputs: Sequence[torch.Tensor], output: torch.Tensor, root: int, /) -> float: ...

    def all_to_all(self, ticket: int, group: int, form: int, size: int, inputs: torch.Tensor | Sequence[torch.Tensor], outputs: torch.Tensor | Sequence[torch.Tensor], /) -> float: ...

    def map_window(self, group: int, window: int, tensor: torch.Tensor, remote: bool, /) -> bytes: ...

    def open_window(self, group: int, window: int, rank: int, mapped: torch.Tensor | None, rkey: bytes, address: int, bytes: int, /) -> None: ...

    def close_window(self, group: int, window: int) -> None: ...

    def put(self, ticket: int, group: int, window: int, rank: int, offset: int, tensor: torch.Tensor, /) -> bool: ...

    def get(self, ticket: int, group: int, window: int, rank: int, offset: int, tensor: torch.Tensor, /) -> bool: ...

    def atomic(self, ticket: int, group: int, window: int, rank: int, offset: int, swap: bool, bytes: int, first: int, second: int, /) -> bool: ...

    def signal(self, ticket: int, group: int, window: int, rank: int, /) -> bool: ...

    def wait_signal(self, ticket: int, group: int, window: int, rank: int, /) -> bool: ...

    def cancel_wait(self, group: int, window: int, rank: int, ticket: int, /) -> bool: ...

    def flush(self, ticket: int, group: int, window: int, rank: int, /) -> bool: ...

TURNS: int = 16

NO_DEVICE: int = -1

HOST: int = 0

CUDA: int = 1
