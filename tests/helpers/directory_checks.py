"""What a directory holds, and whether it makes sense."""

import struct
from typing import Any

import numpy as np

from helpers.oracle.oracle import Oracle
from helpers.oracle.slots import IN_TABLE, STORED
from raykv.directory.directory import Directory
from raykv.directory.kernels import columns
from raykv.protocol import host_of


def _all(directory: Directory) -> list[Any]:
    """What has slabs."""
    return [*directory.nodes.values(), *directory._tier_catalog.tiers.values()]


def rows_of_directory(directory: Directory) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """State of every slot by (node, slab, slot), and the age by which it is evicted."""
    out = {}
    c = directory._size_classes.c
    names = {number: name for name, number in directory.quotas._numbers.items()} | {0: ""}
    for there in _all(directory):
        for number, record in there.slabs.items():
            base, slots = directory._size_classes.span(record)
            for slot, row in enumerate(c.rows[base : base + slots].tolist()):
                k0, k1, gen, last, _, _, _, holds, state, uses = row
                out[there.index, number, slot] = _row(
                    columns.STATES[state],
                    struct.pack("<QQ", k0, k1),
                    gen,
                    last,
                    holds,
                    uses,
                    int(c.slabs[record]["gen"]),
                    names[int(c.tenants[base + slot])] if columns.STATES[state] in IN_TABLE else "",
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


def _where(directory: Directory, row: int) -> tuple[int, int, int]:
    c = directory._size_classes.c
    slab = c.slabs[c.pages[row >> columns.PAGE_BITS]]
    return int(c.size_classes[slab["size_class"]]["node"]), int(slab["number"]), row - int(slab["base"])


def chain_of(directory: Directory, key: bytes) -> list[int]:
    row = int(directory._find(key)[1][0])
    rows = directory._size_classes.c.rows
    chain = []
    while row >= 0:
        chain.append(row)
        row = int(rows[row]["same"])
    return chain


def chains_of(directory: Directory) -> dict[bytes, list[tuple[int, int, int]]]:
    """Slots of every key, as the table has them."""
    c = directory._size_classes.c
    out = {}
    for entry in c.table[c.table != 0].tolist():
        row = (entry & 0xFFFFFFFF) - 1
        key = struct.pack("<QQ", *c.rows[row].tolist()[:2])
        chain = chain_of(directory, key)
        assert chain and chain[0] == row, "an entry that a probe does not find"
        out[key] = [_where(directory, row) for row in chain]
    return out


def pins_of_directory(directory: Directory) -> list[Any]:
    return [(key, _where(directory, row), gen) for key, (row, gen) in directory.pins.items()]


def pins_of_oracle(oracle: Oracle) -> list[Any]:
    return [(key, (row.slab.node, row.slab.number, row.slot), gen) for key, (row, gen) in oracle.pins.items()]


def check_invariants(directory: Directory) -> None:
    c = directory._size_classes.c
    spans = [directory._size_classes.span(record) for there in _all(directory) for record in there.slabs.values()]
    live = np.concatenate([np.arange(base, base + slots) for base, slots in spans] or [np.zeros(0, int)])
    assert len(set(live.tolist())) == len(live), "slabs overlap"
    rows = c.rows
    state = rows["state"]
    closing = [node.slabs[n] for node in directory.nodes.values() for n in node.closing & node.slabs.keys()]
    half = np.concatenate(
        [np.arange(first, first + n) for first, n in map(directory._size_classes.span, closing)] or [np.zeros(0, int)]
    )
    assert (state[np.setdiff1d(live, half)] < columns.CLOSED).all()
    for node in directory.nodes.values():
        mine = [*node.spare, *node.slabs, *node.withdrawn]
        assert len(set(mine)) == len(mine) and set(mine) >= set(range(node.offered)), "a slab lost, or there twice"
    assert not rows["holds"][np.setdiff1d(np.arange(len(rows)), live)].any()
    for node in directory.stats(0.0)["nodes"].values():
        assert sum(node[name] for name in columns.STATES) == node["slots"]
    _check_lists(directory, live)
    _check_tenants(directory, live)
    _check_table(directory, live)
    _check_holds(directory, live)
    _check_tiers(directory)
    _check_gpu_demotion(directory)


def _check_lists(directory: Directory, live: Any) -> None:
    c = directory._size_classes.c
    rows = c.rows.tolist()
    size_classes = {
        size_class: columns.READY for node in directory.nodes.values() for size_class in node.size_classes.values()
    }
    size_classes |= {
        size_class: columns.EXTERNAL
        for tier in directory._tier_catalog.tiers.values()
        for size_class in tier.size_classes.values()
    }
    seen = set()
    for size_class, kept in size_classes.items():
        lists = [columns.FREE, columns.REPLICA, *[kept] * columns.TENANTS_MAX]
        for which, of in enumerate(lists):
            head, tail, count, clean_tail, clean_count = c.lists[size_class * columns.LISTS_PER_CLASS + which].tolist()
            assert which >= columns.READY_LISTS or (clean_tail, clean_count) == (-1, 0)
            before, row, length, last, clean = -1, head, 0, 1 << 62, 0
            while row >= 0:
                length += 1
                assert length <= count and row not in seen
                seen.add(row)
                assert rows[row][4] == before and rows[row][8] == of
                clean += clean > 0 or row == clean_tail
                assert int(c.slabs[c.pages[row >> columns.PAGE_BITS]]["size_class"]) == size_class
                if of != columns.FREE:
                    assert rows[row][3] < last, "not in the order of use"
                    last = rows[row][3]
                before, row = row, rows[row][5]
            assert (length, before) == (count, tail)
            assert clean == clean_count and (clean_count > 0) == (clean_tail >= 0), "not the clean rows"
        staging = [
            r for r in live.tolist() if rows[r][8] == columns.STAGING and _size_class_of(directory, r) == size_class
        ]
        assert len(staging) == c.size_classes[size_class]["staging"] <= c.size_classes[size_class]["window"]
        quarantined = [
            r for r in live.tolist() if rows[r][8] == columns.QUARANTINED and _size_class_of(directory, r) == size_class
        ]
        assert len(quarantined) == c.size_classes[size_class]["quarantined"]
    for row in live.tolist():
        _, _, _, _, before, _, _, holds, state, _ = rows[row]
        listed = before != columns.NOWHERE
        assert listed == (row in seen)
        unheld = holds == 0 and state in (columns.FREE, columns.READY, columns.REPLICA, columns.EXTERNAL)
        assert listed or not unheld, "an unheld slot that nobody can take"
        assert not listed or unheld or state in (columns.READY, columns.EXTERNAL)
        assert holds > 0 or state not in (columns.WRITING, columns.STAGING, columns.DROPPED)
        assert holds == 0 or state not in (columns.FREE, columns.QUARANTINED)


def _check_tenants(directory: Directory, live: Any) -> None:
    """Each is charged for its primaries in memory, all copies of a key are charged to one, and it has one list."""
    c, count = directory._size_classes.c, directory._size_classes.tenants
    assert count == max(directory.quotas._numbers.values(), default=0) + 1
    charge = c.size_classes["charge"][c.slabs["size_class"][c.pages[live >> columns.PAGE_BITS]]]
    primaries = np.isin(c.rows["state"][live], (columns.READY, columns.WRITING))
    used = np.bincount(c.tenants[live], charge * primaries, columns.TENANTS_MAX)
    assert (c.quotas["used"] == used).all(), "a tenant is charged for what it has not"
    for key in chains_of(directory) if count > 1 else ():
        assert len({int(c.tenants[row]) for row in chain_of(directory, key)}) == 1, "a key of two tenants"
    charges = c.size_classes["charge"][: directory._size_classes._class_count]
    for size_class, its_charge in enumerate(charges.tolist()):
        for tenant in range(columns.TENANTS_MAX):
            row = int(c.lists[size_class * columns.LISTS_PER_CLASS + columns.READY_LISTS + tenant]["head"])
            while row >= 0:
                assert tenant == (c.tenants[row] if its_charge else 0), "a block in the list of another tenant"
                row = int(c.rows[row]["next"])


def _size_class_of(directory: Directory, row: int) -> int:
    c = directory._size_classes.c
    return int(c.slabs[c.pages[row >> columns.PAGE_BITS]]["size_class"])


def _check_table(directory: Directory, live: Any) -> None:
    c = directory._size_classes.c
    chains = chains_of(directory)
    assert len(chains) == c.state[columns.ENTRIES]
    in_table = [(key, row) for key in chains for row in chain_of(directory, key)]
    assert all(struct.pack("<QQ", *c.rows[row].tolist()[:2]) == key for key, row in in_table)
    wanted = [columns.STATES.index(state) for state in IN_TABLE]
    assert sorted(row for _, row in in_table) == sorted(live[np.isin(c.rows["state"][live], wanted)].tolist())
    for key in chains:
        states = [int(c.rows[row]["state"]) for row in chain_of(directory, key)]
        primaries = states.count(columns.READY) + states.count(columns.WRITING)
        assert primaries == 1 or (primaries == 0 and columns.REPLICA not in states), "replicas of nothing"


def _check_holds(directory: Directory, live: Any) -> None:
    """A row is held by leases, reservations, pins and GPU demotions, and by nothing else."""
    rows = directory._size_classes.c.rows
    holds = np.zeros(len(rows), int)
    for client in directory.clients.values():
        for hold in client.holds.values():
            for held, gens in ((hold.source, hold.gens), (hold.staged, hold.staged_gens)):
                mine = held >= 0
                np.add.at(holds, held[mine], 1)
                assert (rows["gen"][held[mine]] == gens[mine]).all(), "a held block was given away"
    for key, (row, gen) in directory.pins.items():
        holds[row] += 1
        assert row in chain_of(directory, key) and rows["gen"][row] == gen, "a pin of what is gone"
        assert columns.STATES[rows["state"][row]] in ("ready", "external"), "a copy that is evicted first is pinned"
    for target in directory._gpu_demotion._under_way.values():
        np.add.at(holds, target[target >= 0], 1)
    assert (holds == rows["holds"]).all(), "a count that is not that of the holds"


def _check_tiers(directory: Directory) -> None:
    """A key is in a tier once, and no key that is there is to be deleted."""
    rows = directory._size_classes.c.rows
    for node in directory.nodes.values():
        assert not (rows["state"][_rows_in(directory, node)] == columns.EXTERNAL).any()
    for tier in directory._tier_catalog.tiers.values():
        mine = _rows_in(directory, tier)
        assert np.isin(rows["state"][mine], (columns.FREE, columns.DEMOTING, columns.EXTERNAL, columns.DROPPED)).all()
        tier_class = mine[np.isin(rows["state"][mine], (columns.DEMOTING, columns.EXTERNAL))]
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
        stats = directory.stats(0.0)["tiers"][tier.owner or ""]
        fill, taken = directory.tier_fill()[tier.owner or ""], rows["state"][mine] != columns.FREE
        assert fill["blocks"] == taken.sum() >= stats["blocks"] and fill["bytes_used"] >= stats["bytes_used"]
        assert stats["blocks"] == len(external) and stats["bytes_used"] <= max(stats["capacity"], tier.slab_bytes)


def _check_gpu_demotion(directory: Directory) -> None:
    """What is being demoted to memory is of the last answer to one GPU, and in the memory of that GPU's node."""
    rows, demoting = directory._size_classes.c.rows, set()
    for name, target in directory._gpu_demotion._under_way.items():
        for row in target[target >= 0].tolist():
            assert row not in demoting and rows[row]["state"] in (columns.DEMOTING, columns.DROPPED)
            assert _where(directory, row)[0] == directory.nodes[host_of(name)].index
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
    spans = [directory._size_classes.span(record) for record in there.slabs.values()]
    return np.sort(np.concatenate([np.arange(base, base + slots) for base, slots in spans] or [np.zeros(0, int)]))
