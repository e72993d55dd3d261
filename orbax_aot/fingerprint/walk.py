"""The walk: everything that a function reaches, written as one stream of tokens.

The walk is a work list. A simple value is written where it is met. An object with an identity gets
a number at first sight and is written as that number from then on, so that aliasing and cycles are
part of the stream, and its content follows when its turn comes. The order is the walk's own,
never that of a hash table, so that the stream is the same in every process.

Which attributes count is decided by name (see `Mentions`): an attribute that nothing reached by
the walk can name does not matter, which is what lets a method stay the same program while a
neighbour changes.
"""

from __future__ import annotations

import collections
import hashlib
import re
import types
from collections.abc import Callable, Iterable

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Far more than any training step reaches; walking this much takes about a second.
_MOST_OBJECTS = 500_000
_MOST_REASONS = 20
# Flax calls methods by names that are given to it under these; they may have been computed.
_KEYWORDS_FOR_NAMES = frozenset({"method", "methods"})

Task = Callable[[], None]


class Mentions:
    """The names that reached code can look up, and the attributes that wait for their name."""

    def __init__(self, release: Callable[[list[Task]], None]) -> None:
        self._release = release
        self._names: set[str] = set()
        self._texts: set[str] = set()
        self._everything = False
        self._waiting_for_everything: list[Task] = []
        self._waiting: dict[str, list[Task]] = {}
        # Attributes of objects, which libraries may look up too; those of modules they do not.
        self._waiting_of_objects: dict[str, list[Task]] = {}
        self._constructed: set[int] = set()
        self._any_class_constructed = False
        self._waiting_constructors: dict[int, list[Task]] = {}

    def add(self, names: Iterable[str]) -> None:
        """Notes names that reached code looks up."""
        for name in names:
            if name not in self._names:
                self._names.add(name)
                self._release(self._waiting.pop(name, []))
                self._release(self._waiting_of_objects.pop(name, []))

    def add_text(self, text: str) -> None:
        """Notes what a reached string could name, as for methods that are given by name."""
        if text not in self._texts:
            self._texts.add(text)
            if text in _KEYWORDS_FOR_NAMES:
                self.add_everything()
            self.add(_IDENTIFIER.findall(text))

    def add_everything(self) -> None:
        """Notes that code computes names: every attribute counts."""
        self._everything = True
        self._release(self._waiting_for_everything)
        self._waiting_for_everything = []
        self.add(sorted(self._waiting.keys() | self._waiting_of_objects.keys()))
        self.add_any_constructor()

    def when_everything(self, task: Task) -> None:
        """Runs `task` once code may go through attributes whatever their names, if ever."""
        if self._everything:
            self._release([task])
        else:
            self._waiting_for_everything.append(task)

    def add_for_libraries(self, names: frozenset[str]) -> bool:
        """Notes names that library code looks up; says whether any attribute waited for one."""
        met = sorted(name for name in self._waiting_of_objects if name in names)
        for name in met:
            self._release(self._waiting_of_objects.pop(name))
        return bool(met)

    def when(self, name: str, task: Task, *, of_module: bool) -> None:
        """Runs `task` once `name` is mentioned, if ever."""
        if self._everything or name in self._names:
            self._release([task])
        else:
            waiting = self._waiting if of_module else self._waiting_of_objects
            waiting.setdefault(name, []).append(task)

    def wait_for_libraries(self) -> bool:
        """Whether attributes wait that only library code could look up."""
        return bool(self._waiting_of_objects)

    def add_constructed(self, classes: Iterable[type]) -> None:
        """Notes classes that reached code may call."""
        for cls in classes:
            self._constructed.add(id(cls))
            self._release(self._waiting_constructors.pop(id(cls), []))

    def add_any_constructor(self) -> None:
        """Notes that code takes the class of an object, and so may construct another."""
        self._any_class_constructed = True
        for tasks in list(self._waiting_constructors.values()):
            self._release(tasks)
        self._waiting_constructors.clear()

    def when_constructed(self, cls: type, task: Task) -> None:
        """Runs `task` once reached code may construct objects of `cls`, if ever."""
        if self._any_class_constructed or id(cls) in self._constructed:
            self._release([task])
        else:
            self._waiting_constructors.setdefault(id(cls), []).append(task)


class Walk:
    """One stream of tokens, with the reasons why it may not be the whole truth."""

    def __init__(self, write_value: Callable[[Walk, object], None]) -> None:
        self._write_value = write_value
        self._tokens: list[str] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # so that no identity is used twice
        self._tasks: collections.deque[tuple[str, Task]] = collections.deque()
        self._reasons: dict[str, None] = {}
        self._place = "the function"
        self.mentions = Mentions(self._add_tasks)
        # Functions whose earlier state a cache may hold, and functions that could get there.
        self.cached: list[tuple[object, str]] = []
        self.uncached: list[object] = []

    # -- writing ----------------------------------------------------------------------------------

    def write(self, *tokens: str) -> None:
        """Writes tokens; each carries its length, so that no two streams read the same."""
        for token in tokens:
            self._tokens.append(f"{len(token)}:{token}")

    def visit(self, value: object) -> None:
        """Writes a value, or its number and later its content."""
        if len(self._tokens) > 4 * _MOST_OBJECTS:
            self.undecidable("reaches too many objects to look at")
            return
        try:
            self._write_value(self, value)
        except Exception as error:  # objects of users may raise anything when looked at
            self.undecidable(f"{type(error).__name__} while looking at a {type(value).__name__}")

    def number(self, value: object, kind: str, place: str | None, task: Task) -> None:
        """Writes the number of an object; at first sight `task` is to write its content."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self.keep(value)
            here = place or self._place

            def write_content() -> None:
                self.write("is", str(number), kind)
                task()

            self._tasks.append((here, write_content))
        self.write("ref", str(number))

    def keep(self, value: object) -> int:
        """Gives an object its number, which must not have one."""
        number = self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        return number

    def number_of(self, value: object) -> int | None:
        """The number of an object that was met."""
        return self._numbers.get(id(value))

    def attribute(self, owner: object, name: str, value: object, *, always: bool = False) -> None:
        """Writes the attribute `name` of a numbered object, at once or when its name comes up."""
        task = self._attribute_task(owner, name, value)
        if always or (name.startswith("__") and name.endswith("__")):
            task()
        else:
            self.mentions.when(name, task, of_module=isinstance(owner, types.ModuleType))

    def constructor(self, owner: type, name: str, value: object) -> None:
        """Writes a constructor of a numbered class once code may construct objects of it."""
        self.mentions.when_constructed(owner, self._attribute_task(owner, name, value))

    def attribute_order(self, owner: object, names: Iterable[str]) -> None:
        """Writes in which order attributes were set, for code that goes through all of them."""
        number, text = self._numbers[id(owner)], " ".join(names)
        self.mentions.when_everything(lambda: self.write("order", str(number), text))

    def _attribute_task(self, owner: object, name: str, value: object) -> Task:
        place, number = self._place, self._numbers[id(owner)]

        def write_attribute() -> None:
            self._place = place
            self.write("attribute", str(number), name)
            self.visit(value)

        return write_attribute

    def undecidable(self, reason: str) -> None:
        """Notes why an equal digest would not mean the same program."""
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.setdefault(f"{reason} [{self._place}]")

    def note_cacheable(self, function: object, what: str | None) -> None:
        """Notes a function that caches can know; `what` says by which this one is known, if any."""
        if what is None:
            self.uncached.append(function)
        else:
            self.cached.append((function, f"{what} [{self._place}]"))

    # -- running ----------------------------------------------------------------------------------

    def _add_tasks(self, tasks: list[Task]) -> None:
        self._tasks.extend((self._place, task) for task in tasks)

    def run(self, library_names: Callable[[], frozenset[str]]) -> None:
        """Works until nothing is left to look at.

        `library_names` gives the names that library code looks up; it is asked only where
        attributes are left that nobody else has named.
        """
        self._work()
        while self.mentions.wait_for_libraries():
            if not self.mentions.add_for_libraries(library_names()):
                break
            self._work()

    def _work(self) -> None:
        while self._tasks:
            self._place, task = self._tasks.popleft()
            try:
                task()
            except Exception as error:  # see `visit`
                self.undecidable(f"{type(error).__name__}: {error}"[:200])

    def let_go(self) -> None:
        """Drops the objects that were kept, so that they die with their last user."""
        self._kept.clear()
        self._numbers.clear()
        self._tasks.clear()
        self.cached.clear()
        self.uncached.clear()
        self.mentions = Mentions(lambda tasks: None)

    def digest(self) -> str:
        """The digest of all that was written."""
        text = "".join(self._tokens)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def reasons(self) -> tuple[str, ...]:
        """Why the digest cannot be trusted to mean the same program, if so."""
        return tuple(self._reasons)
