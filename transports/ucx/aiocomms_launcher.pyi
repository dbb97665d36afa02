def version() -> str: ...

COPY: int = 0

ALL_REDUCE: int = 1

REDUCE: int = 2

BROADCAST: int = 3

ALL_GATHER: int = 4

REDUCE_SCATTER: int = 5

SEND: int = 6

RECV: int = 7

DONE: int = 0

NCCL_FAILED: int = 1

CUDA_FAILED: int = 2

DROPPED: int = 3

ASLEEP: int = 4

class Mark:
    pass

class Line:
    pass

class Port:
    @property
    def fd(self) -> int: ...

class Launcher:
    def open(self) -> Port: ...

    def add(self, port: Port, stream: int, comm: int) -> Line: ...

    def mark(self, stream: int) -> Mark: ...

    def join(self, stream: int, mark: Mark) -> None: ...

    def launch(self, line: Line, after: Mark, calls: list[tuple[int, int, int, int, int, int, int]]) -> int: ...

    def wait_stream(self, port: Port, id: int, stream: int) -> None: ...

    def take(self, port: Port) -> list[tuple[int, int, int]]: ...

    def cuda_error(self, code: int) -> str: ...

    def cut(self, line: Line) -> None: ...

    def cut_all(self, port: Port) -> None: ...

    def settle(self, line: Line, patience: float) -> bool: ...

    def settle_all(self, port: Port) -> None: ...

    def drain(self, line: Line) -> None: ...

    def drain_all(self, port: Port) -> None: ...

    def close(self, port: Port) -> None: ...

    def end(self, patience: float) -> None: ...

def make(functions: dict[str, int], device: int, spin_us: int) -> Launcher: ...
