"""The model of the toy family; it imports torch, so it is a module of its own."""

from tnetcli.models.tnet import TNet


class ToyModel(TNet):
    """A TNet under another name."""

    family = "toy"
