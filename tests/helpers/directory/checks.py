"""Reads a directory's state, and checks that the state is consistent."""

import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers.directory.oracle.oracle import Oracle
from helpers.directory.oracle.slots import IN_TABLE, STORED
from raykv.directory.directory import Directory
from raykv.directory.kernels import columns
from raykv.protocol.location import KEY_BYTES, host_of


def _all(directory: Directory) -> list[Any]:
    """All nodes and tiers: the owners of slabs."""
    return [*directory.nodes.values(), *directory.tier_catalog.tiers.values()]


def rows_of_directory(directory: Directory) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """The state of every slot, by (node, slab, slot), with the age by which the slot is evicted."""
    out = {}
    c = directory.c
    names = {number: name for name, number in directory.quotas._numbers.items()} | {0: ""}
    for there in _all(directory):
        for number, record in there.slabs.items():
            base, slots = directory.size_classes.span(record)
            slab_gen, tenants = int(c.slabs[record]["gen"]), c.tenants[base : base + slots].tolist()
            for slot, row in enumerate(c.rows[base : base + slots].tolist()):
                k0, k1, gen, last, _, _, _, holds, number_of_state, uses = row
                state = columns.STATES[number_of_state]
                out[there.index, number, slot] = _row(
                    *(state, struct.pack("<QQ", k0, k1), gen, last, holds, uses, slab_gen),
                    names[tenants[slot]] if state in IN_TABLE else "",
                )
    return out


def rows_of_oracle(oracle: Oracle) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    return {
        (row.slab.node, row.slab.number, row.slot): _row(
            *(row.state, row.key, row.gen, row.last, row.holds, row.uses, row.slab.gen),
            row.tenant if row.state in IN_TABLE else "",
        )
        for row in oracle.rows()
    }


def _row(
    state: str, key: bytes, gen: int, last: int, holds: int, uses: int, slab_gen: int, tenant: str
) -> tuple[Any, ...]:
    return (
        state,
        key if state in IN_TABLE else None,
        gen if state != "free" else None,
        last if state in STORED and not holds else None,
        holds,
        uses if state in IN_TABLE else None,
        slab_gen,
        tenant,
    )


def slots_of(directory: Directory, rows: Sequence[int]) -> list[tuple[int, int, int]]:
    c, at = directory.c, np.array(rows, np.int64)
    slab = c.slabs[c.pages[at >> columns.PAGE_BITS]]
    nodes = c.size_classes["node"][slab["size_class"]]
    return list(zip(nodes.tolist(), slab["number"].tolist(), (at - slab["base"]).tolist(), strict=True))


def rows_of(directory: Directory, key: bytes) -> list[int]:
    return _rows_from(int(directory.find(key)[0]), directory.c.rows["same"])


def _rows_from(row: int, same: Any) -> list[int]:
    """The rows of a key. same: for each row, the next row of the same key."""
    rows = []
    while row >= 0:
        rows.append(row)
        row = int(same[row])
    return rows


RowsByKey = dict[bytes, list[int]]  # rows of every key


def rows_by_key(directory: Directory) -> RowsByKey:
    c = directory.c
    heads = (c.table[c.table != 0] & 0xFFFFFFFF) - 1
    keys = np.stack((c.rows["k0"][heads], c.rows["k1"][heads]), axis=1).tobytes()
    assert (directory.find(keys) == heads).all(), "an entry that a probe does not find"
    same = c.rows["same"].tolist()
    return {keys[KEY_BYTES * i : KEY_BYTES * (i + 1)]: _rows_from(row, same) for i, row in enumerate(heads.tolist())}


def pins_of_directory(directory: Directory) -> list[Any]:
    slots = slots_of(directory, [row for row, _ in directory.pins.values()])
    return [(key, slot, gen) for slot, (key, (_, gen)) in zip(slots, directory.pins.items(), strict=True)]


def pins_of_oracle(oracle: Oracle) -> list[Any]:
    return [(key, (row.slab.node, row.slab.number, row.slot), gen) for key, (row, gen) in oracle.pins.items()]


def check_invariants(directory: Directory) -> RowsByKey:
    """AssertionError if the state is inconsistent. Returns `rows_by_key`."""
    c = directory.c
    spans = [directory.size_classes.span(record) for there in _all(directory) for record in there.slabs.values()]
    live = np.concatenate([np.arange(base, base + slots) for base, slots in spans] or [np.zeros(0, int)])
    rows = c.rows
    state, is_live = rows["state"], np.zeros(len(rows), bool)
    is_live[live] = True
    assert is_live.sum() == len(live), "slabs overlap"
    assert not rows["holds"][~is_live].any()
    closing = [node.slabs[n] for node in directory.nodes.values() for n in node.closing & node.slabs.keys()]
    half = np.concatenate(
        [np.arange(first, first + n) for first, n in map(directory.size_classes.span, closing)] or [np.zeros(0, int)]
    )
    is_live[half] = False
    assert (state[is_live] < columns.CLOSED).all()
    for node in directory.nodes.values():
        mine = [*node.spare, *node.slabs, *node.withdrawn]
        assert len(set(mine)) == len(mine) and set(mine) >= set(range(node.offered)), "a slab lost, or there twice"
    stats, by_key = directory.stats(0.0), rows_by_key(directory)
    for node in stats["nodes"].values():
        assert sum(node[name] for name in columns.STATES) == node["slots"]
    _check_lists(directory, live)
    _check_tenants(directory, live, by_key)
    _check_table(directory, live, by_key)
    _check_holds(directory, by_key)
    _check_tiers(directory, stats["tiers"])
    _check_gpu_demotion(directory)
    return by_key


def _check_lists(directory: Directory, live: Any) -> None:
    c = directory.c
    rows, lists = c.rows.tolist(), c.lists.tolist()
    of_rows = directory.size_classes.size_classes_of(live)
    class_of = dict(zip(live.tolist(), of_rows.tolist(), strict=True))
    size_classes = {
        size_class: columns.READY for node in directory.nodes.values() for size_class in node.size_classes.values()
    }
    size_classes |= {
        size_class: columns.EXTERNAL
        for tier in directory.tier_catalog.tiers.values()
        for size_class in tier.size_classes.values()
    }
    seen = set()
    for size_class, kept in size_classes.items():
        of_list = [columns.FREE, columns.REPLICA, *[kept] * columns.TENANTS_MAX]
        for which, of in enumerate(of_list):
            head, tail, count, clean_tail, clean_count, *done, kept_row, kept_count, _ = lists[
                size_class * columns.LISTS_PER_CLASS + which
            ]
            assert which >= columns.READY_LISTS or (clean_tail, clean_count, kept_row, kept_count) == (-1, 0, -1, 0)
            before, row, length, last, clean, passed, done_with = -1, head, 0, 1 << 63, 0, 0, [-1, -1]
            while row >= 0:
                length += 1
                assert length <= count and row not in seen
                seen.add(row)
                assert rows[row][4] == before and rows[row][8] == of
                clean += clean > 0 or row == clean_tail
                passed += (passed > 0 or row == kept_row) and rows[row][3] > columns.IN_USE
                assert class_of.get(row) == size_class
                if of != columns.FREE:
                    assert rows[row][3] < last, "not in the order of use"
                    last = rows[row][3]
                    for i, below in enumerate((columns.IN_USE, columns.IN_TIME)):
                        if done_with[i] < 0 and last < below:
                            done_with[i] = row
                before, row = row, rows[row][5]
            assert (length, before, done_with) == (count, tail, done)
            assert clean == clean_count and (clean_count > 0) == (clean_tail >= 0), "not the clean rows"
            assert passed == kept_count and (kept_count > 0) == (kept_row >= 0), "not the rows that are passed over"
    in_state = Counter((class_of[row], rows[row][8]) for row in live.tolist())
    for size_class in size_classes:
        of_class = c.size_classes[size_class]
        assert in_state[size_class, columns.STAGING] == of_class["staging"] <= of_class["window"]
        assert in_state[size_class, columns.QUARANTINED] == of_class["quarantined"]
    for row in live.tolist():
        _, _, _, _, before, _, _, holds, state, _ = rows[row]
        listed = before != columns.NOWHERE
        assert listed == (row in seen)
        unheld = holds == 0 and state in (columns.FREE, columns.READY, columns.REPLICA, columns.EXTERNAL)
        assert listed or not unheld, "an unheld slot that nobody can take"
        assert not listed or unheld or state in (columns.READY, columns.EXTERNAL)
        assert holds > 0 or state not in (columns.WRITING, columns.STAGING, columns.DROPPED)
        assert holds == 0 or state not in (columns.FREE, columns.QUARANTINED)


def _check_tenants(directory: Directory, live: Any, by_key: RowsByKey) -> None:
    """A tenant pays for primaries in memory. All copies of a key have one tenant. Each tenant has its own list."""
    c, count = directory.c, directory.size_classes.tenants
    assert count == max(directory.quotas._numbers.values(), default=0) + 1
    charge = c.size_classes["charge"][directory.size_classes.size_classes_of(live)]
    state = c.rows["state"][live]
    primaries = (state == columns.READY) | (state == columns.WRITING)
    used = np.bincount(c.tenants[live], charge * primaries, columns.TENANTS_MAX)
    assert (c.quotas["used"] == used).all(), "a tenant is charged for what it has not"
    tenants, after = c.tenants.tolist(), c.rows["next"].tolist()
    for copies in by_key.values() if count > 1 else ():
        assert len({tenants[row] for row in copies}) == 1, "a key of two tenants"
    charges = c.size_classes["charge"][: directory.size_classes._class_count].tolist()
    heads = c.lists["head"].tolist()
    for size_class, its_charge in enumerate(charges):
        for tenant in range(columns.TENANTS_MAX):
            row = heads[size_class * columns.LISTS_PER_CLASS + columns.READY_LISTS + tenant]
            while row >= 0:
                assert tenant == (tenants[row] if its_charge else 0), "a block in the list of another tenant"
                row = after[row]


def _check_table(directory: Directory, live: Any, by_key: RowsByKey) -> None:
    c = directory.c
    assert len(by_key) == c.state[columns.ENTRIES]
    rows = c.rows.tolist()
    in_table = [(key, row) for key, copies in by_key.items() for row in copies]
    assert all(struct.pack("<QQ", *rows[row][:2]) == key for key, row in in_table)
    wanted = {columns.STATES.index(state) for state in IN_TABLE}
    assert sorted(row for _, row in in_table) == sorted(row for row in live.tolist() if rows[row][8] in wanted)
    for copies in by_key.values():
        states = [rows[row][8] for row in copies]
        primaries = states.count(columns.READY) + states.count(columns.WRITING)
        assert primaries == 1 or (primaries == 0 and columns.REPLICA not in states), "replicas of nothing"


def _check_holds(directory: Directory, by_key: RowsByKey) -> None:
    """A row is held by leases, reservations, pins and GPU demotions, and by nothing else."""
    rows = directory.c.rows
    holds = np.zeros(len(rows), int)
    for client in directory.clients.values():
        for hold in client.holds.values():
            for held, gens in (hold.blocks[:2], hold.blocks[2:]):
                mine = held >= 0
                np.add.at(holds, held[mine], 1)
                assert (rows["gen"][held[mine]] == gens[mine]).all(), "a held block was given away"
    for key, (row, gen) in directory.pins.items():
        holds[row] += 1
        assert row in by_key.get(key, ()) and rows["gen"][row] == gen, "a pin of what is gone"
        assert columns.STATES[rows["state"][row]] in ("ready", "external"), "a copy that is evicted first is pinned"
    for target in directory.gpu_demotion._under_way.values():
        np.add.at(holds, target[target >= 0], 1)
    assert (holds == rows["holds"]).all(), "a count that is not that of the holds"


def _check_tiers(directory: Directory, stats: dict[str, Any]) -> None:
    """A key is in a tier at most once, and no key of a stored block is to be deleted."""
    rows = directory.c.rows
    for node in directory.nodes.values():
        assert not (rows["state"][_rows_in(directory, node)] == columns.EXTERNAL).any()
    for tier in directory.tier_catalog.tiers.values():
        mine = _rows_in(directory, tier)
        states = rows["state"][mine]
        assert {*states.tolist()} <= {columns.FREE, columns.DEMOTING, columns.EXTERNAL, columns.DROPPED}
        tier_class = mine[(states == columns.DEMOTING) | (states == columns.EXTERNAL)]
        keys = [struct.pack("<QQ", *rows[row].tolist()[:2]) for row in tier_class.tolist()]
        assert len(set(keys)) == len(keys), "a key twice in a tier"
        external = {
            key for key, row in zip(keys, tier_class.tolist(), strict=True) if rows[row]["state"] == columns.EXTERNAL
        }
        assert not external & tier.to_delete.keys(), "a block in the tier is about to be deleted"
        demoting = [
            (r, g) for at, gens in tier.demoting.values() for r, g in zip(at.tolist(), gens.tolist(), strict=True)
        ]
        under_way = [r for r, g in demoting if rows[r]["gen"] == g and rows[r]["state"] == columns.DEMOTING]
        assert sorted(under_way) == tier_class[rows["state"][tier_class] == columns.DEMOTING].tolist()
        said, fill = stats[tier.owner or ""], directory.tier_catalog.fill()[tier.owner or ""]
        taken = rows["state"][mine] != columns.FREE
        assert fill["blocks"] == taken.sum() >= said["blocks"] and fill["bytes_used"] >= said["bytes_used"]
        assert said["blocks"] == len(external) and said["bytes_used"] <= max(said["capacity"], tier.slab_bytes)


def _check_gpu_demotion(directory: Directory) -> None:
    """A row being demoted to memory is in the last answer to one GPU, and lies on that GPU's node."""
    rows, demoting = directory.c.rows, set()
    for name, target in directory.gpu_demotion._under_way.items():
        mine = target[target >= 0].tolist()
        for row, (index, _, _) in zip(mine, slots_of(directory, mine), strict=True):
            assert row not in demoting and rows[row]["state"] in (columns.DEMOTING, columns.DROPPED)
            assert index == directory.nodes[host_of(name)].index
            demoting.add(row)
    keys = []
    for node in directory.nodes.values():
        mine = _rows_in(directory, node)
        found = mine[rows["state"][mine] == columns.DEMOTING].tolist()
        assert not found or not node.on_gpu
        assert demoting >= set(found), "a demotion that is nobody's"
        keys += [struct.pack("<QQ", *rows[row].tolist()[:2]) for row in found]
    assert len(set(keys)) == len(keys), "a block is demoted twice"


def _rows_in(directory: Directory, there: Any) -> Any:
    spans = [directory.size_classes.span(record) for record in there.slabs.values()]
    return np.sort(np.concatenate([np.arange(base, base + slots) for base, slots in spans] or [np.zeros(0, int)]))
