"""Chunks in and out of a store as one plain tar file with a member `<id>.kvc` each. Everything here blocks.

An archive may come from anybody: its member headers are read block by block, none but regular files of a chunk's name
and size are looked at, and a chunk gets its place only when all of it has been verified.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvblend.store.disk import CHUNK_SUFFIX, CHUNKS_NAME, TEMP_SUFFIX
from kvblend.store.errors import ChunkError, StoreError
from kvblend.store.files import FILE_MODE, open_regular, sync_folder
from kvblend.store.format import ALIGNMENT_BYTES, header_region_bytes, parse_header
from kvblend.store.maintenance import check_ids, chunk_path, claimed, forget_catalog, own_folder
from kvblend.store.survey import BadOrder, ChunkInfo, Progress, Selection, read_header, survey, verify_file

REFUSED_SHOWN_MAX = 20
_COPY_BYTES = 1 << 20
_MEMBER_NAME = re.compile(r"[0-9a-f]{64}\.kvc")


class ArchiveDamaged(StoreError):
    """The archive is no plain tar file, or it breaks off; `report` says what was taken in before that."""

    def __init__(self, reason: str, report: ImportReport) -> None:
        super().__init__(reason)
        self.report = report


@dataclass(slots=True)
class ImportReport:
    """What became of an archive's members: stored, there already, or refused with the first few reasons."""

    stored: int = 0
    stored_bytes: int = 0
    present: int = 0
    refused: int = 0
    reasons: list[tuple[str, str]] = field(default_factory=list)

    def refuse(self, name: str, reason: str) -> None:
        """Count a member that is not taken in."""
        self.refused += 1
        if len(self.reasons) < REFUSED_SHOWN_MAX:
            # a name may hold anything, a terminal's control characters included
            self.reasons.append((ascii(name[:100]), reason))


@dataclass(slots=True)
class ExportReport:
    """How many chunks an archive holds, their bytes, and which ones were left out as damaged, with the reason."""

    chunks: int = 0
    file_bytes: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)


class _Member(NamedTuple):
    name: str
    is_file: bool
    start: int
    size: int


def export_chunks(root: Path, target: Path, selection: Selection, progress: Progress | None = None) -> ExportReport:
    """Write the selected chunks to a new tar file; damaged ones are left out. It has its name only when it is whole.

    Raises StoreUnusable, OSError, and BadOrder for a target that exists or lies in the store, or an id not stored.
    """
    if target.exists() or target.is_symlink():
        raise BadOrder(f"{target} exists already; an export does not replace a file")
    if target.resolve().is_relative_to(root.resolve()):
        raise BadOrder(f"{target} lies in the store itself; choose a place outside of it")
    report = ExportReport()
    with claimed(root):
        found = survey(root)
        check_ids(found.chunks, selection)
        chosen = list(filter(selection.holds, found.chunks))
        temp = target.with_name(target.name + TEMP_SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temp, flags, FILE_MODE), "wb") as file:
            try:
                _write_members(root, file, chosen, report, progress)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temp, target)
            except BaseException:
                temp.unlink(missing_ok=True)
                raise
        sync_folder(target.absolute().parent)
    return report


def import_chunks(root: Path, source: Path, progress: Progress | None = None) -> ImportReport:
    """Take in the chunks of a tar file; `root` becomes a store if it is new or empty. A chunk that is there stays.

    Raises StoreUnusable; OSError, also for a source that is no regular file; and ArchiveDamaged. Whatever is raised,
    the chunks that were counted as stored are durable, and nothing else was made visible.
    """
    report = ImportReport()
    with open(open_regular(source), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        members = _read_members(file, size, report)
        first = next(members, None)  # what is no archive at all makes no store
        seen: set[str] = set()
        with claimed(root, create=True):
            for member in members if first is None else itertools.chain((first,), members):
                if reason := _judge(member, seen):
                    report.refuse(member.name, reason)
                else:
                    seen.add(member.name)
                    _take_in(root, file, member, report)
                if progress is not None:
                    progress(member.start + member.size, size)
    return report


def _write_members(
    root: Path, file: BinaryIO, chosen: list[ChunkInfo], report: ExportReport, progress: Progress | None
) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for done, chunk in enumerate(chosen, 1):
            path = chunk_path(root, chunk.id)
            try:
                verify_file(path)
            except (ChunkError, OSError) as error:
                report.damaged.append((chunk.id, str(error)))
            else:
                member = tarfile.TarInfo(chunk.id + CHUNK_SUFFIX)
                member.size, member.mtime = chunk.file_bytes, int(chunk.stored_at)
                with open(open_regular(path), "rb") as content:
                    archive.addfile(member, content)
                report.chunks += 1
                report.file_bytes += chunk.file_bytes
            if progress is not None:
                progress(done, len(chosen))


def _read_members(file: io.FileIO, size: int, report: ImportReport) -> Iterator[_Member]:
    """The archive's members in order; none claims bytes that the archive does not have."""
    at = 0
    while at < size:
        block = os.pread(file.fileno(), tarfile.BLOCKSIZE, at)
        if not block.strip(b"\0"):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            what = f"byte {at} is no member's header" if at else "it does not start as an uncompressed tar file does"
            raise ArchiveDamaged(f"{what}: {error}", report) from None
        at += tarfile.BLOCKSIZE
        if not 0 <= header.size <= size - at:
            raise ArchiveDamaged(
                f"member {header.name[:100]!a} claims {header.size} bytes at byte {at}; "
                f"the archive has {size - at} more",
                report,
            )
        # a link, folder or device has no data whatever size it claims, as in tar itself
        length = header.size if header.isreg() or header.type not in tarfile.SUPPORTED_TYPES else 0
        if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            length = header.size
        yield _Member(header.name, header.type in (tarfile.REGTYPE, tarfile.AREGTYPE), at, header.size)
        at += -(-length // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    raise ArchiveDamaged(f"it ends after {size} bytes without the mark of a tar file's end", report)


def _judge(member: _Member, seen: set[str]) -> str | None:
    """Why a member is not even looked at, or None."""
    if not member.is_file:
        return "it is no regular file"
    if not _MEMBER_NAME.fullmatch(member.name):
        return "its name is not 64 lower-case hex digits and .kvc"
    if member.name in seen:
        return "the archive has it twice"
    return None


def _take_in(root: Path, file: io.FileIO, member: _Member, report: ImportReport) -> None:
    """Copy one member beside its place, verify it there, and give it its name."""
    target = chunk_path(root, member.name.removesuffix(CHUNK_SUFFIX))
    with contextlib.suppress(ChunkError, OSError):
        read_header(target)
        report.present += 1
        return
    folder = own_folder(root, CHUNKS_NAME, target.parent.name)
    temp = target.with_suffix(TEMP_SUFFIX)
    try:
        _check_head(file, member)
        _copy(file, member, temp)
        verify_file(temp)  # its stem is the id under this name too
        if target.exists():
            forget_catalog(root)  # it may know other things about the file that is replaced
        os.replace(temp, target)
        sync_folder(folder)
    except ChunkError as error:
        report.refuse(member.name, str(error))
    else:
        report.stored += 1
        report.stored_bytes += member.size
    finally:
        temp.unlink(missing_ok=True)


def _check_head(file: io.FileIO, member: _Member) -> None:
    """Raises ChunkError for what cannot be a chunk of the member's size, before any of it is copied."""
    region_bytes = header_region_bytes(os.pread(file.fileno(), min(ALIGNMENT_BYTES, member.size), member.start))
    parse_header(os.pread(file.fileno(), min(region_bytes, member.size), member.start), member.size)


def _copy(file: io.FileIO, member: _Member, temp: Path) -> None:
    temp.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temp, flags, FILE_MODE), "wb") as target:
        at, end = member.start, member.start + member.size
        while at < end and (block := os.pread(file.fileno(), min(end - at, _COPY_BYTES), at)):
            target.write(block)
            at += len(block)
        target.flush()
        os.fsync(target.fileno())
