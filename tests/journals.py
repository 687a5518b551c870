"""What every command that resumes by a journal owes the person who gives it."""

from pathlib import Path

from children import Kvstore


def assert_blocks_that_are_gone_are_missed(
    kvstore: Kvstore, call: list[object], new: Path, journal: Path
) -> None:
    """Another work's journal is refused before anything is written, and so is the own one
    while the disk that it tells of is not there.

    Args:
        kvstore: the command line.
        call: writes blocks of 5 shares below `new`.
        new: a folder that is not there yet.
        journal: the file that `call` names; not there yet.
    """
    call = [*call, "--journal", journal]
    journal.write_text('{"work": "another"}\n')
    assert (kvstore(*call)[0], new.exists()) == (2, False)
    journal.unlink()
    assert kvstore(*call)[0] == 0
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    unmounted = new.rename(new.with_name("unmounted"))
    code, _, err = kvstore(*call)
    assert (code, new.exists()) == (2, False)
    assert "found none in 5 of them: it is another disk, or was emptied" in err
    unmounted.rename(new)
    assert kvstore(*call)[0] == 0
