import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

_GLIBC = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")

_COUNT = """
import ctypes, sys, threading
from federation import heap

if sys.argv[1] == "limited":
    heap.set_up()
libc = ctypes.CDLL(None)
libc.fopen.restype, libc.malloc.restype = ctypes.c_void_p, ctypes.c_void_p
all_here = threading.Barrier(8)

def allocate():
    all_here.wait()
    libc.malloc(1000)
    all_here.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""
"""Has eight threads allocate at the same time, and writes down what the C library then tells of its heaps."""


@pytest.mark.skipif(not _GLIBC, reason="counts glibc's heaps")
def test_many_threads_share_two_heaps(tmp_path: Path) -> None:
    """Eight threads make no third heap once the limit is set; they do where it is not."""
    heaps = {}
    for how in ("limited", "as ever"):
        file = tmp_path / how
        subprocess.run([sys.executable, "-P", "-c", _COUNT, how, str(file)], check=True)
        heaps[how] = file.read_text().count("<heap nr=")

    assert heaps["limited"] <= 2
    assert heaps["as ever"] > 2
