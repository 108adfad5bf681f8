"""The C library's heap keeps what is freed, so that the same step meets the same pages again.

glibc takes a block above a threshold from the system and gives it back when it is freed, and gives back the
end of its heap when that is longer than twice as much:

    heap   | x | y | buffers |        free   | x | y |        the next call takes new pages for its buffers

A new page costs a microsecond or so: a convolution whose buffers lay at the end of the heap took
7.8 ms instead of 5.3, and whose lie there is chance. The thresholds rise with the largest block that was
freed, to `MOST_HEAP_BLOCK_BYTES` at most; who has set them keeps them.
"""

from __future__ import annotations

import torch

MOST_HEAP_BLOCK_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX of glibc's malloc, with the block's own header
HEADER_BYTES = 64 << 10


def keep_freed_memory() -> None:
    """Raise glibc's thresholds as far as it goes by itself; nothing elsewhere, and no memory is touched."""
    torch.empty(MOST_HEAP_BLOCK_BYTES - HEADER_BYTES, dtype=torch.uint8)
