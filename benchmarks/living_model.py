"""What a living index should hold after calls, the calls, and how the two are compared: for the
scripts that stop its writer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import as_filter
from retrieval.serving.store import record, structure, upkeep
from retrieval.serving.store.contract import Generation, Item, widths_of
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.structure import StructureChoice

from scaled_bundle import make_bundle

WIDTH, BUNDLES, FLUSH, LEAST = 8, 3, 32, 48
IDS = 400
CALLS = (
    "upsert",
    "large",
    "delete",
    "where",
    "tend",
    "compact",
    "snapshot",
    "begin",
    "embed",
    "switch",
    "drop",
    "restructure",
    "reopen",
)
WEIGHTS = (8, 3, 3, 1, 3, 1.5, 1.5, 2, 5, 3, 1, 1, 1)
Call = dict[str, Any]


@dataclass
class State:
    """What an index should hold.

    Attributes:
        items: version of each item, by id; all else of an item follows from the two.
        generations: of each, by number: which bundle, the ids that it leaves out with their
            versions, and its state.
    """

    items: dict[str, int] = field(default_factory=dict)
    generations: dict[int, tuple[int, dict[str, int], str]] = field(
        default_factory=lambda: {1: (0, {}, "served")}
    )

    def after(self, call: Call) -> State:
        """Return what it should hold after a call."""
        items, all_ = (
            dict(self.items),
            {n: (b, dict(out), s) for n, (b, out, s) in self.generations.items()},
        )
        name = call["call"]
        if name in ("upsert", "large"):
            items |= dict(call["items"])
        elif name == "delete":
            items = {id: one for id, one in items.items() if id not in call["ids"]}
        elif name == "where":
            items = {id: one for id, one in items.items() if _price(id, one) != call["price"]}
        elif name == "begin":
            if all(bundle != call["bundle"] for bundle, _, _ in all_.values()):
                all_[call["number"]] = (call["bundle"], {}, "building")
        elif name == "embed":
            all_[call["number"]][1].update({id: items[id] for id in call["left_out"]})
        elif name == "switch" and call["ready"]:
            all_ = {n: (b, out, "kept" if s == "served" else s) for n, (b, out, s) in all_.items()}
            all_[call["number"]] = (*all_[call["number"]][:2], "served")
        elif name == "drop":
            del all_[call["number"]]
        return State(items, all_)

    @property
    def served(self) -> int:
        """The number of the generation that is searched."""
        return next(number for number, (*_, state) in self.generations.items() if state == "served")


def _price(id: str, version: int) -> int:
    return (int(id[2:]) * 7 + version) % 11


def _features(id: str, version: int) -> np.ndarray:
    return np.random.default_rng((int(id[2:]), version)).normal(size=WIDTH).astype(np.float32)


def item_of(id: str, version: int, bundle: int) -> Item:
    """Return the item that an id and its version stand for, as a bundle embeds it."""
    features = _features(id, version)
    original = f"{id} {version}".encode() * (version % 40)
    return Item(
        id,
        str(version % 5),
        {"price": _price(id, version), "version": version},
        None,
        None,
        "copy",
        original or None,
        len(original),
        None,
        None,
        {"vector": features * np.float32(bundle + 1), "features": features},
    )


def small() -> None:
    """Have little fill a segment or a log, so that every kind of work happens often."""
    upkeep._MIN_DEAD_ROWS = FLUSH
    structure.MIN_ROWS = LEAST
    record._CHECKPOINT_PAGES = 40


class Writing:
    """Does random calls, in the child.

    Args:
        folder: of the index.
        bundles: opened.
        state: what it holds.
        seed: of the calls.
        tell: takes what is begun and what has returned.
        first: a call that was cut short, to be done again.
    """

    def __init__(
        self,
        folder: Path,
        bundles: list[Bundle],
        state: State,
        seed: int,
        tell: Callable[[str, Any], None],
        first: Call | None,
    ) -> None:
        self.folder, self.bundles, self.state, self.tell, self.first = (
            folder,
            bundles,
            state,
            tell,
            first,
        )
        self.random = random.Random(seed)
        self.background = self.random.random() < 0.5
        self.store = LocalStore(folder, upkeep=self.background)

    def run(self) -> None:
        """Do calls until this process is killed."""
        while True:
            call = self.first or self.draw()
            self.first = None
            if call is not None:
                self.tell("begin", call)
                self.do(call)
                self.tell("end", None)
                self.state = self.state.after(call)

    def draw(self) -> Call | None:
        """Return a call that can be made now; None where the drawn one cannot."""
        (name,) = self.random.choices(CALLS, WEIGHTS)
        call: Call = {"call": name}
        others = [number for number in self.state.generations if number != self.state.served]
        if name in ("upsert", "large"):
            count = (
                self.random.randint(1, 12)
                if name == "upsert"
                else self.random.randint(FLUSH, 3 * FLUSH)
            )
            ids = self.random.sample(range(IDS), count)
            return call | {"items": [[f"id{n}", self.random.randrange(1 << 30)] for n in ids]}
        if name == "delete":
            ids = sorted(self.state.items)
            return call | {
                "ids": self.random.sample(ids, min(len(ids), self.random.randint(1, 30)))
            }
        if name == "where":
            return call | {"price": self.random.randrange(11)} if self.state.items else None
        if name == "snapshot":
            return call | {"name": f"copy{self.random.randrange(1 << 40)}"}
        if name == "begin":
            known = value_of(
                self.store, "select seq from sqlite_sequence where name = 'generations'"
            )
            return call | {"bundle": self.random.randrange(BUNDLES), "number": known + 1}
        if name == "restructure":
            return call | {"backend": self.random.choice(["auto", "ivf"])}
        if name in ("embed", "switch", "drop"):
            if not others or (name == "drop" and self.random.random() < 0.5):
                return None
            number = self.random.choice(others)
            call["number"] = number
            generation = self.generation(number)
            if name == "embed":
                call["left_out"] = []
                pending = self.store.pending(generation, self.random.choice([10, 100, 1000]))
                call["pending"] = [one.id for one in pending]
                if pending and self.random.random() < 0.2:
                    call["left_out"] = [self.random.choice(pending).id]
            elif name == "switch":
                call["ready"] = not self.store.pending(generation, 1)
        return call

    def generation(self, number: int) -> Generation:
        """Return a generation by its number."""
        return next(one for one in self.store.generations() if one.number == number)

    def do(self, call: Call) -> None:
        """Do a call."""
        store, name = self.store, call["call"]
        served = self.state.generations[self.state.served][0]
        if name in ("upsert", "large"):
            items = [item_of(id, version, served) for id, version in call["items"]]
            assert store.upsert(items, self.bundles[served].sha256) == sum(
                one.id in self.state.items for one in items
            )
        elif name == "delete":
            assert store.delete(call["ids"]) == len(call["ids"])
        elif name == "where":
            gone = sum(_price(id, one) == call["price"] for id, one in self.state.items.items())
            assert store.delete(where=as_filter(f"price = {call['price']}")) == gone
        elif name == "tend":
            store.upkeep.step()
        elif name == "compact":
            store.compact()
        elif name == "snapshot":
            store.snapshot(self.folder.parent / call["name"])
        elif name == "begin":
            store.begin(
                self.bundles[call["bundle"]],
                widths_of(self.bundles[call["bundle"]], features=WIDTH),
            )
        elif name == "embed":
            generation = self.generation(call["number"])
            bundle = self.state.generations[call["number"]][0]
            pending = store.pending(generation, max(1, len(call["pending"])))
            done = [
                item_of(one.id, self.state.items[one.id], bundle)
                for one in pending
                if one.id not in call["left_out"]
            ]
            store.embed(generation, done, call["left_out"])
        elif name == "switch":
            assert store.switch(self.generation(call["number"])) == call["ready"]
        elif name == "drop":
            store.drop(self.generation(call["number"]))
        elif name == "restructure":
            store.restructure(
                StructureChoice(
                    call["backend"], {"lists": 4, "probes": 4} if call["backend"] == "ivf" else {}
                )
            )
        elif name == "reopen":
            store.close()
            self.store = LocalStore(self.folder, upkeep=self.background)


def value_of(store: LocalStore, sql: str) -> int:
    with store.record.reading() as connection:
        return int(record.value(connection, sql) or 0)


# Checking


def differences(store: LocalStore, state: State, bundles: list[Bundle], seed: int) -> list[str]:
    """Return in what an opened index differs from what it should hold."""
    wrong = []
    number = state.served
    bundle, left_out, _ = state.generations[number]
    found = [(one.number, one.bundle, one.state) for one in store.generations()]
    if found != [(n, bundles[b].sha256, s) for n, (b, _, s) in sorted(state.generations.items())]:
        return [f"generations {found}"]
    expected = {id: item_of(id, one, bundle) for id, one in state.items.items()}
    scanned, after = [], None
    while page := store.scan(after=after, limit=100):
        scanned += page
        after = page[-1].id
    if [one.id for one in scanned] != sorted(expected):
        wrong.append(
            f"scan: {len(set(expected) - {one.id for one in scanned})} lost,"
            f" {len({one.id for one in scanned} - set(expected))} too many"
        )
        return wrong
    got = store.get(expected, arrays=True)
    for id, want in expected.items():
        one = got[id]
        if (one.label, dict(one.metadata), one.bytes) != (want.label, want.metadata, want.bytes):
            wrong.append(f"{id}: its label or metadata")
        missing = left_out.get(id) == state.items[id]
        if set(one.arrays) != (set() if missing else {"vector", "features"}):
            wrong.append(f"{id}: has arrays {sorted(one.arrays)}, left out: {missing}")
        elif any(
            not np.array_equal(array, want.arrays[name]) for name, array in one.arrays.items()
        ):
            wrong.append(f"{id}: its arrays")
        if store.original(id) != want.original:
            wrong.append(f"{id}: its original")
    if store.count() != len(expected):
        wrong.append("count")
    ids = sorted(id for id in expected if left_out.get(id) != state.items[id])
    return wrong + _searches(
        store, [expected[id] for id in ids], expected, bundles[bundle].sha256, seed
    )


def _searches(
    store: LocalStore, items: list[Item], all_: dict[str, Item], sha256: str, seed: int
) -> list[str]:
    """Compare neighbours with brute force, with a filter and without."""
    wrong = []
    queries = np.random.default_rng(seed).normal(size=(4, WIDTH)).astype(np.float32)
    for price in (None, 3, 7):
        where = None if price is None else as_filter(f"price = {price}")
        if price is not None and not all_:
            continue
        if store.count(where) != sum(
            price is None or one.metadata["price"] == price for one in all_.values()
        ):
            wrong.append(f"count of price {price}")
        chosen = [one for one in items if price is None or one.metadata["price"] == price]
        answers = store.search(queries, 10, sha256, where=where)
        for query, answer in zip(queries, answers, strict=True):
            distances = [
                float(((one.vector.astype(np.float64) - query) ** 2).sum()) for one in chosen
            ]
            nearest = {chosen[at].id for at in np.argsort(distances)[:10]}
            if {one.id for one in answer} != nearest:
                wrong.append(
                    f"neighbours with price {price}: {len({one.id for one in answer} ^ nearest)}"
                    " differ"
                )
    return wrong


def leftovers(folder: Path, store: LocalStore) -> list[str]:
    """Return files of an index that its record does not name."""
    with store.record.reading() as connection:
        rows = record.ask(connection, "select stem, widths, structure from generations")
    named = {f"arrays/{stem}.{name}" for stem, widths, _ in rows for name in json.loads(widths)}
    for *_, text in rows:
        named |= {f"arrays/{name}" for name in structure.Structure.names(text)}
    named |= {f"bundles/{one.bundle[:16]}/" for one in store.generations()}
    named |= {"index.json", "acknowledged", *(record.FILE + end for end in ("", "-wal", "-shm"))}
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [
        one
        for one in found
        if one not in named
        and not any(one.startswith(name) for name in named if name.endswith("/"))
    ]


def check(
    folder: Path,
    states: list[State],
    copies: dict[str, tuple[State, bool]],
    bundles: list[Bundle],
    seed: int,
) -> dict[str, Any]:
    """Return which of some states an index is in, and all that is wrong; `copies`: what each
    snapshot holds, and whether it must be there.
    """
    with LocalStore(folder, upkeep=False) as store:
        faults = [differences(store, state, bundles, seed) for state in states]
        which = next((at for at, fault in enumerate(faults) if not fault), None)
        wrong = [] if which is not None else faults[-1] or faults[0]
        store._begin_to_write()
        wrong += [f"left over: {one}" for one in leftovers(folder, store)]
    for name, (state, must) in copies.items():
        if (copy := folder.parent / name).exists():
            with LocalStore(copy, upkeep=False) as store:
                wrong += [f"snapshot: {one}" for one in differences(store, state, bundles, seed)]
                wrong += [f"snapshot: left over: {one}" for one in leftovers(copy, store)]
            shutil.rmtree(copy)
        elif must:
            wrong.append("snapshot: lost")
    for part in folder.parent.glob(".copy*.part"):
        shutil.rmtree(part)
    return {"which": which, "wrong": wrong}


def make_bundles(folder: Path) -> list[Bundle]:
    """Write bundles, and open them."""
    for number in range(BUNDLES):
        make_bundle(folder / f"bundle{number}", WIDTH, number + 1.0)
    return [Bundle.open(folder / f"bundle{number}", threads=1) for number in range(BUNDLES)]
