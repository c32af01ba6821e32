"""JSONPath (RFC 9535): which values of a record a rule means.

python-jsonpath reads the paths and tests their filters. Values are found here: its nodes know their own place, which
costs more than parsing the record, and it sees one of two equal keys.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import jsonpath
from jsonpath import segments, selectors

Find = Callable[[Any], list[Any]]
"""The values that a path selects in a record, in order."""
Step = str | int | None
"""A key, an index, or None for all children."""

_Select = Callable[[Any, Any], Iterable[Any]]  # the children of a node that a selector means, given the record, too


class Pairs(Mapping[str, Any]):
    """An object in which a key occurs twice: `items` and `values` give both, a look-up gives the last."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self._pairs, self._last = pairs, dict(pairs)

    def __getitem__(self, key: str) -> Any:
        return self._last[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def items(self) -> Any:
        return self._pairs

    def values(self) -> Any:
        return [value for _, value in self._pairs]


def make_object(pairs: list[tuple[str, Any]]) -> "dict[str, Any] | Pairs":
    """An object of JSON, given its keys and values in order."""
    made = dict(pairs)
    return made if len(made) == len(pairs) else Pairs(pairs)


class _Environment(jsonpath.JSONPathEnvironment):
    max_recursion_depth = 1 << 30  # a record that is nested too deep was refused before


_environment = _Environment(strict=True)  # without the extensions of the library


def check(path: str) -> None:
    """Raises ValueError, with the column, if it is not a JSONPath."""
    if not path.startswith("$"):
        raise ValueError("a path begins with $, the record")
    try:
        _segments(path)
    except jsonpath.JSONPathError as error:
        column = error.token.index + 1 if error.token else 0
        raise ValueError(f"{error.message} at column {column or len(path) + 1}") from None  # 0: at the end
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@cache
def finder(path: str) -> Find:
    """The function that finds the values of a valid path."""
    steps = [
        (isinstance(segment, segments.JSONPathRecursiveDescentSegment), [*map(_selector, segment.selectors)])
        for segment in _segments(path)
    ]

    def find(record: Any) -> list[Any]:
        nodes = [record]
        for is_descendant, select in steps:
            if is_descendant:
                nodes = [inner for node in nodes for inner in _descendants(node)]
            nodes = [child for node in nodes for children in select for child in children(node, record)]
        return nodes

    keys = plain_steps(path)
    if keys is None or not all(isinstance(key, str) for key in keys):
        return find

    def find_one(record: Any) -> list[Any]:  # most paths, in half of the time
        node = record
        for key in keys:
            if type(node) is not dict:
                return find(record)
            if key not in node:
                return []
            node = node[key]
        return [node]

    return find_one


def plain_steps(path: str) -> tuple[Step, ...] | None:
    """The steps of a path in which each selects one key, one index from the start, or all children; None of others."""
    steps: list[Step] = []
    for segment in _segments(path):
        selector = segment.selectors[0]
        if len(segment.selectors) > 1 or isinstance(segment, segments.JSONPathRecursiveDescentSegment):
            return None
        if isinstance(selector, selectors.NameSelector):
            steps.append(selector.name)
        elif isinstance(selector, selectors.IndexSelector) and selector.index >= 0:
            steps.append(selector.index)
        elif isinstance(selector, selectors.WildcardSelector):
            steps.append(None)
        else:
            return None
    return tuple(steps)


def first_keys(path: str) -> list[str] | None:
    """The keys of a record that decide what a path finds; None: all may."""
    first = next(iter(_segments(path)), None)
    if first is None or isinstance(first, segments.JSONPathRecursiveDescentSegment):
        return None
    if "?" in path:  # a filter may look at all of the record, wherever in the path it is
        return None
    named = [selector.name for selector in first.selectors if isinstance(selector, selectors.NameSelector)]
    return named if len(named) == len(first.selectors) else None


def strings(value: Any) -> Iterator[str]:
    """All strings of a value, at any depth, in order."""
    if type(value) is str:
        yield value
    else:
        for child in _children(value):
            yield from strings(child)


def _segments(path: str) -> tuple[segments.JSONPathSegment, ...]:
    compiled = _environment.compile(path)
    assert isinstance(compiled, jsonpath.JSONPath), "the RFC has no unions of paths"
    return compiled.segments


def _children(node: Any, _: Any = None) -> Iterable[Any]:
    if type(node) is list:
        return node
    return node.values() if type(node) is dict or type(node) is Pairs else ()


def _descendants(node: Any) -> Iterator[Any]:
    """The node and all collections in it, each before what it contains; without recursion."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in _children(node) if type(child) in (dict, list, Pairs)][::-1]


def _selector(selector: Any) -> _Select:
    if isinstance(selector, selectors.NameSelector):
        name = selector.name
        return lambda node, _: _named(node, name)
    if isinstance(selector, selectors.IndexSelector):
        index = selector.index
        return lambda node, _: node[index:][:1] if type(node) is list and index >= -len(node) else ()
    if isinstance(selector, selectors.SliceSelector):
        part = selector.slice
        return lambda node, _: node[part] if type(node) is list and part.step != 0 else ()
    if isinstance(selector, selectors.WildcardSelector):
        return _children
    return lambda node, record: [match.obj for match in selector.resolve(_match(node, record))]


def _named(node: Any, name: str) -> Iterable[Any]:
    if type(node) is Pairs:
        return [value for key, value in node.items() if key == name]
    return (node[name],) if type(node) is dict and name in node else ()


def _match(node: Any, record: Any) -> jsonpath.JSONPathMatch:
    """A node as the library knows it, for its filters: they ask for the node and for the record."""
    return jsonpath.JSONPathMatch(filter_context={}, obj=node, parent=None, path="", parts=(), root=record)
