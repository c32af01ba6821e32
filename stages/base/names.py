"""Names that come from elsewhere: of files in a manifest or an archive, of models, of keys in a file of somebody else.

A name may say `../..`, and a message that quotes it must stay one line of a terminal.
"""


def printable(name: object) -> str:
    r"""The name as a part of one line: `\n` for a line end, `\x1b` for an escape, `\xe9` for a byte of no UTF-8."""
    text = str(name)
    return text if text.isprintable() else "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    code = ord(character)  # Python has an invalid byte of a file's name as the surrogate of this number
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else ascii(character)[1:-1]


def is_utf8(name: str) -> bool:
    """Whether the name of a file is UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_inside(name: str) -> bool:
    """Whether a relative path leads to something below the directory that it is joined to."""
    return "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def is_file_name(name: str) -> bool:
    """Whether that is the name of a file in the directory that it is joined to."""
    return "/" not in name and is_inside(name)
