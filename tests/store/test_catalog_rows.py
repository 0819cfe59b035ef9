"""Rows as bytes: what comes back, and what is not believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.catalog_rows import pack_row, unpack_rows
from kvblend.store.format import KVShape
from kvblend.store.index import IndexRow

SHAPE = KVShape(4, 2, 4, "float32")
seconds = st.floats(0, 1e12)
rows = st.builds(
    IndexRow, st.integers(1, 9), st.integers(1, 1 << 20), st.sampled_from(["-", "0123456789ab", "f" * 12]), seconds,
    st.integers(0, 1 << 60), seconds, seconds,
)  # fmt: skip


@given(st.dictionaries(st.binary(min_size=32, max_size=32), rows, max_size=20))
def test_rows_come_back(found: dict[bytes, IndexRow]) -> None:
    back = unpack_rows([pack_row(digest, row) for digest, row in found.items()], SHAPE)
    assert [(digest, str(row)) for digest, row in back.items()] == [(one, str(row)) for one, row in found.items()]


def test_chunks_of_one_tenant_share_its_tag() -> None:
    packed = [pack_row(bytes([number]) * 32, IndexRow(1, 4096, "0123456789ab")) for number in range(3)]
    assert len({id(row.tenant) for row in unpack_rows(packed, SHAPE).values()}) == 1


def test_one_row_of_another_length_spoils_all() -> None:
    good = pack_row(bytes(32), IndexRow(1, 4096))
    for bad in (good[:-8], good + bytes(8), b""):
        with pytest.raises(ValueError, match="length"):
            unpack_rows([good, bad], SHAPE)
