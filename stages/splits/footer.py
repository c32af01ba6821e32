"""Where the row groups of a Parquet file begin, by its footer: a struct in Thrift's compact protocol.

Not by pyarrow, which gives this place by place: where the size statistics of a column are damaged, it ends the process
(26.0: an exception of C++ that Python's side does not declare).
"""

from functools import lru_cache
from typing import Any

_TRUE, _FALSE, _BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_FIXED = {_BYTE: 1, _DOUBLE: 8, 13: 16}  # bytes; 13: a UUID
# Fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
_ROW_GROUPS, _COLUMNS, _META_DATA, _DATA_PAGE, _DICTIONARY_PAGE = 4, 1, 3, 9, 11


@lru_cache(maxsize=1)  # for all parts of a file
def row_groups(footer: bytes) -> tuple[int, ...]:
    """The offset of the first page of each row group.

    Raises:
        ValueError: the footer is damaged, or of encrypted columns.
    """
    try:
        groups = _Reader(footer).read_struct()[_ROW_GROUPS]
        return tuple(
            min(
                place
                for column in group[_COLUMNS]
                for place in (column[_META_DATA].get(_DICTIONARY_PAGE), column[_META_DATA][_DATA_PAGE])
                if place  # 0, where there is no dictionary
            )
            for group in groups
        )
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("its footer is damaged") from None


class _Reader:
    """Reads values: numbers, lists, and structs as dictionaries by the number of the field; None for all else."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def read_struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._read_byte():
            number = number + (head >> 4) if head >> 4 else self._read_integer()
            kind = head & 15
            fields[number] = None if kind in (_TRUE, _FALSE) else self._read(kind)
        return fields

    def _read(self, kind: int) -> Any:
        if kind in (_INT16, _INT32, _INT64):
            return self._read_integer()
        if kind == _STRUCT:
            return self.read_struct()
        if kind in (_LIST, _SET):
            head = self._read_byte()
            length = head >> 4 if head >> 4 < 15 else self._read_varint()
            return [self._read(_BYTE if head & 15 in (_TRUE, _FALSE) else head & 15) for _ in range(length)]
        # No struct of a footer has a map.
        size = self._read_varint() if kind == _BINARY else _FIXED[kind]
        self._place += size
        if self._place > len(self._data):  # else a list of any length would be read from a few bytes
            raise IndexError
        return None

    def _read_byte(self) -> int:
        self._place += 1
        return self._data[self._place - 1]

    def _read_varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._read_byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise IndexError

    def _read_integer(self) -> int:
        number = self._read_varint()
        return number >> 1 ^ -(number & 1)
