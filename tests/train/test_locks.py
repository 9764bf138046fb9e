"""Locks of a run on the file systems that training uses."""

import errno
import fcntl
import os

import pytest

from scripts.train import pretrain
from scripts.train.run import Run, is_locked, only_trainer


@pytest.fixture
def nfs(monkeypatch):
    """NFSv4 turns flock into locks of bytes: shared ones read the file, exclusive ones write it."""
    flock = fcntl.flock

    def flock_on_nfs(file, operation):
        access = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        lacking = {fcntl.LOCK_SH: os.O_WRONLY, fcntl.LOCK_EX: os.O_RDONLY}
        if access == lacking.get(operation & ~fcntl.LOCK_NB):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_on_nfs)
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: kept.append(hooks))
    kept = []


@pytest.mark.usefixtures("nfs")
def test_ranks_and_launchers_lock_a_run_on_nfs(tmp_path):
    run = Run("mine", tmp_path)
    with only_trainer(run):
        pretrain.hold_shared_lock(run.ranks_lock)
        assert is_locked(run.launcher_lock)
        assert is_locked(run.ranks_lock)
