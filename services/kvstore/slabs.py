"""Memory of the store: one mapping, divided into slabs, each divided into slots of one block size. Knows no keys."""

from __future__ import annotations

import mmap
from typing import Final, NamedTuple

MIN_SLOTS_PER_SLAB: Final = 64
MAX_SLOTS_PER_SLAB: Final = 4096
MAX_SLABS: Final = 64
ALIGNMENT: Final = 64
PAGE: Final = 4096
_POPULATE_WRITE: Final = 23
"""Linux's MADV_POPULATE_WRITE (5.14 and newer): touch pages without changing them."""


class Slot(NamedTuple):
    """One block's memory: `size` bytes from `offset`, in slab number `slab`."""

    slab: int
    offset: int
    size: int


class SlabPool:
    """Hands out slots. Pure bookkeeping on top of one anonymous mapping, which costs no memory until it is touched.

    The first block in an empty pool decides how large a slab is: room for 64 such blocks or more, and at most 64 slabs,
    so that blocks of another layout find room in a slab of their own.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < PAGE:
            raise ValueError(f"a pool needs at least {PAGE} bytes, not {capacity_bytes}")
        self.capacity_bytes = capacity_bytes // PAGE * PAGE
        self._memory = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        self._slab_bytes = 0
        self._usual_size = 0
        self._size_of_slab: list[int] = []
        """Slot size of each slab, 0 where it is not divided."""
        self._used: list[int] = []
        """Slots in use of each slab."""
        self._free: dict[int, list[Slot]] = {}
        """Free slots by size."""

    def slots(self) -> int:
        """How many blocks fit: the slots of divided slabs, and of the others in the size that was seen first."""
        return sum(self._slab_bytes // (size or self._usual_size) for size in self._size_of_slab)

    def used(self, slab: int) -> int:
        """Slots in use of this slab."""
        return self._used[slab]

    def fits(self, n_bytes: int) -> bool:
        """Whether a block of this size could be held if enough others were gone."""
        if any(self._used):
            return 0 < n_bytes <= self._slab_bytes
        return 0 < n_bytes <= self.capacity_bytes

    def size_for(self, n_bytes: int) -> int:
        """The slot size that a block of this size takes; tiny blocks take more, which bounds the number of slots."""
        aligned = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        return min(max(aligned, self._slab_bytes // MAX_SLOTS_PER_SLAB), max(self._slab_bytes, n_bytes))

    def take(self, n_bytes: int) -> Slot | None:
        """A free slot for a block that `fits`; None when one must be freed first."""
        if not any(self._used):
            self._divide(n_bytes)
        size = self.size_for(n_bytes)
        if not self._free.get(size) and not self._assign(size):
            return None
        slot = self._free[size].pop()
        self._used[slot.slab] += 1
        return slot

    def give_back(self, slot: Slot) -> None:
        self._used[slot.slab] -= 1
        self._free[slot.size].append(slot)
        if self._used[slot.slab] == 0:
            self._dissolve(slot.slab)

    def view(self, slot: Slot, n_bytes: int) -> memoryview:
        """The first `n_bytes` of the slot."""
        return self._view[slot.offset : slot.offset + n_bytes]

    def populate(self, offset: int, n_bytes: int) -> bool:
        """Touch these pages now rather than in the first put. False when the kernel cannot, or there are none."""
        length = min(n_bytes, self.capacity_bytes - offset)
        if length <= 0:
            return False
        try:
            self._memory.madvise(_POPULATE_WRITE, offset, length)
        except OSError:
            return False
        return True

    def _divide(self, n_bytes: int) -> None:
        count = min(max(1, self.capacity_bytes // (n_bytes * MIN_SLOTS_PER_SLAB)), MAX_SLABS)
        self._slab_bytes = self.capacity_bytes // count // ALIGNMENT * ALIGNMENT
        self._usual_size = self.size_for(n_bytes)
        self._size_of_slab = [0] * count
        self._used = [0] * count
        self._free = {}

    def _assign(self, size: int) -> bool:
        """Divide an undivided slab into slots of this size. False when there is none."""
        for slab, current in enumerate(self._size_of_slab):
            if current == 0:
                first = slab * self._slab_bytes
                offsets = range(first, first + self._slab_bytes - size + 1, size)
                self._free.setdefault(size, []).extend(Slot(slab, offset, size) for offset in reversed(offsets))
                self._size_of_slab[slab] = size
                return True
        return False

    def _dissolve(self, slab: int) -> None:
        """An empty slab may take another size next."""
        size = self._size_of_slab[slab]
        self._size_of_slab[slab] = 0
        self._free[size] = [slot for slot in self._free[size] if slot.slab != slab]
        if size not in self._size_of_slab:
            del self._free[size]
