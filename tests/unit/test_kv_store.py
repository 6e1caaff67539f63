"""The store's bookkeeping, against a model that knows only the promises."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.slabs import PAGE, SlabPool, Slot
from services.kvstore.store import Block, BlockStore, Ticket
from shared.blocks import checksum
from shared.protocol.kv import BlockMeta

SIZE = 4096


def meta(n: int, size: int = SIZE, version: int = 0) -> BlockMeta:
    return BlockMeta(n.to_bytes(16, "little"), 32, size, checksum(content(n, size, version)))


def content(n: int, size: int = SIZE, version: int = 0) -> bytes:
    return (n * 31 + version).to_bytes(8, "little") * (size // 8)


def put(store: BlockStore, n: int, now_s: float, size: int = SIZE) -> bool:
    plan = store.begin_put(meta(n, size), now_s)
    if not isinstance(plan, Ticket):
        return plan == "stored"
    store.view(plan)[:] = content(n, size)
    store.commit(plan, now_s)
    return True


def keys(*numbers: int) -> list[bytes]:
    return [meta(n).key for n in numbers]


def here(store: BlockStore, *numbers: int) -> list[bool]:
    return [store.get(key) is not None for key in keys(*numbers)]


def make_store(slots: int, **limits: float) -> BlockStore:
    return BlockStore(SlabPool(slots * SIZE), **limits)  # type: ignore[arg-type]


def test_the_least_recently_used_block_goes_first() -> None:
    store = make_store(3)
    for n in range(3):
        assert put(store, n, float(n))
    store.find(keys(0), 3.0)
    assert put(store, 3, 4.0)
    assert here(store, 0, 1, 2, 3) == [True, False, True, True]


def test_of_one_sequence_the_tail_goes_before_the_head() -> None:
    store = make_store(3)
    for n in range(3):
        put(store, n, 0.0)
    store.find(keys(0, 1, 2), 1.0)
    put(store, 3, 2.0)
    assert here(store, 0, 1, 2) == [True, True, False]


def test_after_a_lease_too_the_tail_goes_before_the_head() -> None:
    store = make_store(3)
    for n in range(3):
        put(store, n, 0.0)
    store.lease("r", keys(0, 1, 2), 10.0, 1.0)
    store.release("r", 2.0)
    put(store, 3, 3.0)
    assert here(store, 0, 1, 2) == [True, True, False]


def test_leased_blocks_are_spared_and_a_store_full_of_them_refuses() -> None:
    store = make_store(2)
    put(store, 0, 0.0)
    put(store, 1, 0.0)
    assert store.lease("r", keys(0, 1), 10.0, 0.0) == [True, True]
    assert store.begin_put(meta(2), 1.0) == "full"
    assert here(store, 0, 1) == [True, True]
    assert store.counts.refused_full == 1


def test_a_lease_ends_by_itself_and_its_blocks_become_room() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    store.lease("r", keys(0), 10.0, 0.0)
    assert store.begin_put(meta(1), 9.99) == "full"
    assert put(store, 1, 10.0)
    assert store.stats().leases == 0


def test_leasing_again_makes_a_lease_longer_and_never_shorter() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    store.lease("r", keys(0), 10.0, 0.0)
    store.lease("r", keys(0), 1.0, 5.0)
    assert store.begin_put(meta(1), 9.0) == "full"
    store.lease("r", keys(0), 10.0, 9.0)
    assert store.begin_put(meta(1), 18.0) == "full"
    assert put(store, 1, 19.5)


def test_renewing_sets_the_end_of_a_lease_sooner_or_later() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    store.lease("r", keys(0), 600.0, 0.0)
    assert store.renew("r", 10.0, 5.0)
    assert store.renew("r", 10.0, 14.0)
    assert store.begin_put(meta(1), 23.9) == "full"
    assert put(store, 1, 24.0)
    assert not store.renew("r", 10.0, 24.0)


def test_the_end_that_a_lease_had_before_does_not_cut_a_later_one() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    store.lease("r", keys(0), 10.0, 0.0)
    store.renew("r", 5.0, 1.0)
    store.renew("r", 20.0, 2.0)
    store.expire(11.0)
    assert store.begin_put(meta(1), 21.9) == "full"
    store.release("r", 21.9)
    store.lease("r", keys(0), 30.0, 21.9)
    assert store.begin_put(meta(1), 23.0) == "full"


def test_leases_that_rest_are_named_in_turns_the_one_that_rests_longest_first() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    for n in range(4):
        store.lease(f"r{n}", keys(0), 1000.0, float(n), "tenant")
    store.lease("without log", keys(0), 1000.0, 4.0)
    store.renew("r0", 1000.0, 5.0)
    assert store.resting_leases(10.0, 2, 10.0) == []
    assert store.resting_leases(10.0, 2, 14.9) == [("r1", "tenant"), ("r2", "tenant")]
    assert store.resting_leases(10.0, 2, 14.9) == [("r3", "tenant")]
    assert store.resting_leases(10.0, 9, 14.9) == []
    assert store.resting_leases(10.0, 9, 15.0) == [("r0", "tenant")]
    store.lease("r2", keys(0), 1.0, 16.0)
    assert store.resting_leases(10.0, 9, 24.95) == [("r1", "tenant"), ("r3", "tenant")]


def test_looking_at_leases_that_rest_costs_no_more_than_asked_for_whatever_lies_there() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    for n in range(100):
        store.lease(f"r{n}", keys(0), 1000.0, 0.0)
    store.lease("last", keys(0), 1000.0, 0.0, "tenant")
    rounds = [store.resting_leases(1.0, 10, 5.0) for _ in range(11)]
    assert rounds == [[]] * 10 + [[("last", "tenant")]]


def test_a_block_with_two_leases_is_spared_until_the_second_ends() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    store.lease("a", keys(0), 10.0, 0.0)
    store.lease("a", keys(0), 10.0, 0.0)
    store.lease("b", keys(0), 10.0, 0.0)
    assert store.release("a", 1.0)
    assert store.begin_put(meta(1), 1.0) == "full"
    assert store.release("b", 1.0)
    assert put(store, 1, 1.0)
    assert not store.release("b", 1.0)


def test_leases_are_bounded_in_number_and_length() -> None:
    store = BlockStore(SlabPool(4 * SIZE), max_leases=2, max_lease_s=5.0)
    put(store, 0, 0.0)
    assert store.lease("a", keys(0), 1e9, 0.0) == [True]
    assert store.lease("b", keys(0), 1.0, 0.0) == [True]
    assert store.lease("c", keys(0), 1.0, 0.0) is None
    assert store.lease("c", keys(0), 1.0, 2.0) == [True]
    store.expire(5.0)
    assert store.stats().leases == 0


def test_a_lease_on_nothing_is_not_kept() -> None:
    store = make_store(1)
    assert store.lease("r", keys(7), 10.0, 0.0) == [False]
    assert store.stats().leases == 0


def test_a_block_that_is_read_is_not_evicted_and_its_bytes_stay() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    (block,) = store.pin([meta(0)], 0.0)
    assert block is not None
    assert store.begin_put(meta(1), 1.0) == "full"
    store.discard(block)
    assert store.begin_put(meta(1), 1.0) == "full"
    assert bytes(store.view(block)) == content(0)
    store.unpin(block)
    assert put(store, 1, 2.0)


def test_a_put_that_is_rolled_back_leaves_nothing() -> None:
    store = make_store(1)
    ticket = store.begin_put(meta(0), 0.0)
    assert isinstance(ticket, Ticket)
    assert store.begin_put(meta(1), 0.0) == "full"
    store.roll_back(ticket)
    assert not here(store, 0)[0]
    assert store.stats().used_bytes == 0
    assert put(store, 1, 0.0)


def test_two_puts_of_one_block_at_a_time_keep_one_copy() -> None:
    store = make_store(2)
    first, second = store.begin_put(meta(0), 0.0), store.begin_put(meta(0), 0.0)
    assert isinstance(first, Ticket)
    assert isinstance(second, Ticket)
    store.commit(second, 0.0)
    store.commit(first, 0.0)
    assert store.stats().used_bytes == SIZE
    assert store.begin_put(meta(0), 0.0) == "stored"


def test_a_block_of_other_content_replaces_the_old_one_even_when_leased() -> None:
    store = make_store(2)
    put(store, 0, 0.0)
    store.lease("r", keys(0), 100.0, 0.0)
    newer = meta(0, version=1)
    ticket = store.begin_put(newer, 1.0)
    assert isinstance(ticket, Ticket)
    store.commit(ticket, 1.0)
    assert store.pin([meta(0)], 1.0) == [None]
    (block,) = store.pin([newer], 1.0)
    assert isinstance(block, Block)
    store.unpin(block)
    store.release("r", 1.0)
    assert store.stats().evictable == 1


def test_another_block_size_takes_over_a_slab_that_is_older() -> None:
    store = BlockStore(SlabPool(SIZE * 128))
    for n in range(128):
        assert put(store, n, float(n))
    assert put(store, 1000, 200.0, size=2 * SIZE)
    assert here(store, 1000) == [True]
    assert len(store) == 65


def test_a_slab_with_one_leased_block_is_not_taken_over() -> None:
    store = BlockStore(SlabPool(SIZE * 64))
    for n in range(64):
        put(store, n, float(n))
    store.lease("r", keys(5), 1000.0, 64.0)
    assert store.begin_put(meta(1000, 2 * SIZE), 65.0) == "full"
    assert len(store) == 64


def test_a_block_that_no_slab_can_hold_is_refused_without_evicting() -> None:
    store = make_store(4)
    for n in range(4):
        put(store, n, 0.0)
    assert store.begin_put(meta(9, SIZE * 5), 0.0) == "refused"
    assert len(store) == 4


def test_tiny_blocks_do_not_make_millions_of_slots() -> None:
    pool = SlabPool(1 << 26)
    assert pool.take(1) is not None
    assert pool.slots() <= 64 * 4096


def test_everything_that_changes_is_due_for_the_index() -> None:
    store = make_store(1)
    put(store, 0, 0.0)
    assert list(store.changes) == keys(0)
    store.changes.clear()
    put(store, 1, 1.0)
    assert set(store.changes) == set(keys(0, 1))


def test_what_the_index_is_still_to_be_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.store.MAX_CHANGES", 10)
    store = BlockStore(SlabPool(2 * SIZE), max_leases=2)
    for n in range(100):
        assert put(store, n, float(n))
        store.lease(f"r{n}", keys(n), 0.5, float(n))
        assert len(store.changes) <= 12
        assert len(store.lease_changes) <= 4
    assert set(keys(98, 99)) <= set(store.changes)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([64, 100, 4096, 5000, 20000])), max_size=300), st.data())
def test_slots_never_overlap_and_none_is_lost(steps: list[tuple[bool, int]], data: st.DataObject) -> None:
    pool = SlabPool(64 * PAGE)
    held: list[Slot] = []
    for take, size in steps:
        if take:
            slot = pool.take(size) if pool.fits(size) else None
            if slot is not None:
                assert slot.size >= size
                held.append(slot)
        elif held:
            pool.give_back(held.pop(data.draw(st.integers(0, len(held) - 1))))
        spans = sorted((s.offset, s.offset + s.size) for s in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(start >= 0 and end <= pool.capacity_bytes for start, end in spans)
    for slot in held:
        pool.give_back(slot)
    taken = [pool.take(PAGE) for _ in range(64)]
    assert sum(slot is not None for slot in taken) >= 48


class Model:
    """What must hold: which blocks are protected, what each must contain."""

    def __init__(self) -> None:
        self.leases: dict[str, tuple[float, set[int]]] = {}
        self.pinned: list[tuple[int, Block]] = []
        self.tickets: list[tuple[int, Ticket]] = []

    def expire(self, now_s: float) -> None:
        self.leases = {name: lease for name, lease in self.leases.items() if lease[0] > now_s}

    def protected(self) -> set[int]:
        leased = {n for _, numbers in self.leases.values() for n in numbers}
        return leased | {n for n, _ in self.pinned}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_slot_is_lost_and_no_protected_block_is_evicted(seed: int) -> None:
    _random_walk(seed, steps=500)


def test_the_same_over_ten_thousand_operations() -> None:
    _random_walk(seed=1, steps=10_000)


def _random_walk(seed: int, steps: int) -> None:  # noqa: PLR0912 - one branch per kind of operation
    rng = random.Random(seed)
    slots = rng.randint(1, 12)
    pool = SlabPool(slots * SIZE)
    store = BlockStore(pool, max_leases=6)
    model = Model()
    now_s = 0.0
    for _ in range(steps):
        now_s += rng.random()
        model.expire(now_s)
        n, name = rng.randrange(24), f"r{rng.randrange(8)}"
        match rng.randrange(9):
            case 0 | 1:
                plan = store.begin_put(meta(n), now_s)
                if isinstance(plan, Ticket):
                    store.view(plan)[:] = content(n)
                    model.tickets.append((n, plan))
                elif plan == "full":
                    free = slots - len(store) - len(model.tickets)
                    assert free == 0
                    assert store.stats().evictable == 0
            case 2 if model.tickets:
                _, ticket = model.tickets.pop(rng.randrange(len(model.tickets)))
                store.commit(ticket, now_s)
            case 3 if model.tickets:
                store.roll_back(model.tickets.pop(rng.randrange(len(model.tickets)))[1])
            case 4:
                ttl = rng.random() * 20
                held = store.lease(name, keys(n, n + 1), ttl, now_s)
                if held is not None and (any(held) or name in model.leases):
                    ends, numbers = model.leases.get(name, (0.0, set()))
                    got = {m for m, ok in zip((n, n + 1), held, strict=True) if ok}
                    model.leases[name] = (max(ends, now_s + ttl), numbers | got)
            case 5:
                assert store.release(name, now_s) == (model.leases.pop(name, None) is not None)
            case 6:
                (block,) = store.pin([meta(n)], now_s)
                if block is not None:
                    model.pinned.append((n, block))
            case 7:
                ttl = rng.random() * 20
                assert store.renew(name, ttl, now_s) == (name in model.leases)
                if name in model.leases:
                    model.leases[name] = (now_s + ttl, model.leases[name][1])
            case 8 if model.pinned:
                number, pinned = model.pinned.pop(rng.randrange(len(model.pinned)))
                assert bytes(store.view(pinned)) == content(number)
                store.unpin(pinned)
        assert all(here(store, *model.protected()))
        assert len(store) + len(model.tickets) <= slots
        assert store.stats().used_bytes == (len(store) + len(model.tickets)) * SIZE
        model.expire(now_s)
        store.expire(now_s)
        assert store.stats().leases == len(model.leases)
    for _, ticket in model.tickets:
        store.roll_back(ticket)
    for _, pinned in model.pinned:
        store.unpin(pinned)
    store.expire(now_s + 1e6)
    assert store.stats().evictable == len(store)
    for n in range(100, 100 + slots):
        assert put(store, n, now_s + 1e6)
    assert all(here(store, *range(100, 100 + slots)))


@pytest.mark.parametrize("capacity", [0, PAGE - 1])
def test_a_pool_without_room_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        SlabPool(capacity)
