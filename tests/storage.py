"""Bytes of tensors that are made inside a block: now, and at most."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storage(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = {id(one) for one in self._storages((args, kwargs))}
        for one in self._storages(found):
            # A storage is one object of Python for as long as one of its tensors lives.
            if id(one) not in given | self._alive:
                self._alive.add(id(one))
                self.now += one.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(one, self._freed, id(one), one.nbytes())
        return found

    @staticmethod
    def _storages(values):
        return [one.untyped_storage() for one in tree_leaves(values) if isinstance(one, torch.Tensor)]

    def _freed(self, number, size):
        self._alive.discard(number)
        self.now -= size
