"""What the quickstart prints: headings, the table of slabs, and what is awaited."""

import shutil
import sys
import time

BOLD, DIM, GREEN, RED, RESET = (
    ("\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("",) * 5)
REDRAW_S = 0.1


def say(text):
    print(text, flush=True)


def heading(text):
    say(f"\n{BOLD}{text}{RESET}")


def fail(message):
    raise SystemExit(f"{RED}quickstart: {message}{RESET}")


class Waiting:
    """What is awaited and for how many seconds so far: on a terminal one line, drawn again and again;
    elsewhere a line when it begins and one when it is done. A context; left by an exception it does
    not say that it is done."""

    def __init__(self, what, stream=None, clock=time.monotonic):
        self.what = what
        self.stream = stream or sys.stdout
        self.clock = clock
        self.terminal = self.stream.isatty()

    def __enter__(self):
        self.began = self.clock()
        self.drawn = self.began
        if self.terminal:
            self.draw("")
        else:
            print(f"  waiting for {self.what} ...", file=self.stream, flush=True)
        return self

    def update(self, detail=""):
        """How far it is, in words; only a terminal shows it."""
        if self.terminal and self.clock() - self.drawn >= REDRAW_S:
            self.draw(detail)

    def draw(self, detail):
        self.drawn = self.clock()
        line = f"  waiting for {self.what}: {self.drawn - self.began:.1f} s"
        line += f"; {detail}" if detail else ""
        # A line that wraps would not be drawn over.
        line = line[:shutil.get_terminal_size().columns - 1]
        print(f"\r\033[K{DIM}{line}{RESET}", end="", file=self.stream, flush=True)

    def __exit__(self, error, *_):
        if self.terminal:
            print("\n" if error else "\r\033[K", end="", file=self.stream, flush=True)
        if not error:
            print(f"  {self.what}: {DIM}after {self.clock() - self.began:.1f} s{RESET}",
                  file=self.stream, flush=True)


def stage(status, name):
    """The slabs of each tenant, by role, at one moment of the demonstration."""
    return {"name": name,
            "slabs": {t["tenant"]: {"parameter": t["parameter_slabs"], "kv": t["kv_slabs"]}
                      for t in status["tenants"]}}


def print_slabs(status, title):
    print(f"  {DIM}{title:<34}{'parameter':>10} {'of image':>9} {'kv':>6}{RESET}")
    for tenant in status["tenants"]:
        print(f"    {tenant['tenant']:<32}{tenant['parameter_slabs']:>10} "
              f"{tenant['image_slabs']:>9} {tenant['kv_slabs']:>6}")
    say(f"    {'(free)':<32}{status['free_slabs']:>10}   of {status['pool_slabs']} slabs")


def print_movements(transfers):
    for kind in ("revoke", "scrub", "grant", "restore"):
        rows = [t for t in transfers if t["kind"] == kind]
        slabs, seconds = sum(t["slabs"] for t in rows), sum(t["seconds"] for t in rows)
        if rows:
            say(f"  {kind:<8}{len(rows):>4} times {slabs:>6} slabs {seconds * 1e3:>9.1f} ms in all")
